"""Where virtual ranks wait for each other: the collective of a collective, the recv of a message.

Only the rank that has the floor acts here, so that nothing needs a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .collectives import Call, check_message, perform
from .mismatch import MismatchError, name_ranks
from .recorder import MemoryRecorder
from .scheduler import Scheduler


class PeerGoneError(ConnectionError):
    """A peer will not come: it failed, or is at odds with another."""

    def __init__(self, why: str) -> None:
        super().__init__(f"connection closed by peer: {why}")


@dataclass(eq=False)
class PendingOp:
    """Something that ranks may wait for.

    Attributes:
        title: What it is, in words.
        ranks: World ranks of the group, by group_rank in it.
        absent: Places without which it cannot be.
        any_source: One of the absent is enough.
        done: Nobody has to wait any more.
        errors: The exception for a group_rank, if it is not what it was to be.
        waiting: World ranks that are paused for it.
    """

    title: str
    ranks: tuple[int, ...]
    absent: set[int]
    any_source: bool = False
    done: bool = False
    errors: dict[int, Exception] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """What a rank does that waits for this, in words."""
        return (
            f"waits in {self.title}, for {name_ranks([self.ranks[group_rank] for group_rank in sorted(self.absent)])}"
        )


class WorldState:
    """What the ranks of a world share: the floor, their group states, who is gone, and what each has number."""

    def __init__(self, size: int, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.recorders = [MemoryRecorder() for _ in range(size)]
        self.pending: dict[int, PendingOp] = {}  # by every rank that is paused
        self._size = size
        self._gone: dict[int, str] = {}
        self._group_states: dict[tuple[tuple[int, ...], int], GroupState] = {}
        self._entered: dict[
            tuple[tuple[int, ...], int], int
        ] = {}  # how many group states of these ranks a rank was given

    def group_state(self, ranks: Sequence[int], rank: int) -> GroupState:
        """Returns the group_state of a new group of these ranks: all of them make their groups in the same order."""
        members = tuple(ranks) or tuple(range(self._size))
        nth = self._entered.get((members, rank), 0)
        self._entered[members, rank] = nth + 1
        return self._group_states.setdefault((members, nth), GroupState(self, members, f"group {nth}"))

    def wait(self, pending: PendingOp, group_rank: int) -> None:
        """Pauses a rank until what it waits for is done.

        Raises:
            MismatchError: it and others do not want the same.
            PeerGoneError: somebody without whom it cannot be done is gone.
        """
        rank = pending.ranks[group_rank]
        while not pending.done:
            gone = [
                peer
                for peer in sorted(pending.ranks[group_rank] for group_rank in pending.absent)
                if peer in self._gone
            ]
            if gone and (not pending.any_source or len(gone) == len(pending.absent)):
                raise PeerGoneError(self._gone[gone[0]])
            pending.waiting.append(rank)
            self.pending[rank] = pending
            self.scheduler.wait(rank)
            del self.pending[rank]
        if group_rank in pending.errors:
            raise pending.errors[group_rank]

    def finish(self, pending: PendingOp) -> None:
        """Lets those go on who wait."""
        pending.done = True
        self._wake(pending)

    def mark_gone(self, rank: int, why: str) -> None:
        """Takes note that a rank will call nothing any more; who waits for it will not wait for ever."""
        self._gone[rank] = why
        for pending in {id(each): each for each in self.pending.values()}.values():
            if any(pending.ranks[group_rank] == rank for group_rank in pending.absent):
                self._wake(pending)

    def _wake(self, pending: PendingOp) -> None:
        self.scheduler.wake(sorted(pending.waiting))
        pending.waiting.clear()


class GroupState:
    """The meetings and messages of one group.

    Its name is the same for all members, whatever torch calls the group, and tells groups of the same ranks apart.
    """

    def __init__(self, world_state: WorldState, ranks: tuple[int, ...], name: str) -> None:
        self.world_state, self.ranks, self.name = world_state, ranks, name
        self._calls = [0] * len(ranks)  # made so far, by place
        self._collectives: dict[int, _PendingCollective] = {}  # by number, until all have come
        self._messages: list[_Message] = []  # sent and not received
        self._recvs: list[PendingRecv] = []  # asked for and not sent

    def collective(self, group_rank: int, call: Call) -> PendingOp:
        """Takes a rank's part in the collective that is next for it; the last to come moves the data."""
        number = self._calls[group_rank]
        self._calls[group_rank] += 1
        collective = self._collectives.get(number)
        if collective is None:
            title = f"{call.title(self.ranks)}, call {number} on {_named(self.ranks)}"
            collective = self._collectives[number] = _PendingCollective(title, self.ranks, set(range(len(self.ranks))))
        collective.calls[group_rank] = call
        collective.absent.discard(group_rank)
        if not collective.absent:
            del self._collectives[number]
            collective.perform()
            self.world_state.finish(collective)
        return collective

    def send(self, group_rank: int, target: int, tag: int, tensor: Tensor) -> None:
        """Sends a copy, at once: sending waits for nobody."""
        self._messages.append(_Message(group_rank, target, tag, tensor.detach().clone()))
        self._match()

    def receive(self, group_rank: int, source: int | None, tag: int, tensor: Tensor) -> PendingRecv:
        """Asks for a message from a group_rank, or from any."""
        others = set(range(len(self.ranks))) - {group_rank} if source is None else {source}
        title = f"recv, on {_named(self.ranks)}"
        recv = PendingRecv(
            title, self.ranks, others, source is None, group_rank=group_rank, source=source, tag=tag, tensor=tensor
        )
        self._recvs.append(recv)
        self._match()
        return recv

    def _match(self) -> None:
        for recv in list(self._recvs):
            message = next((message for message in self._messages if recv.accepts(message)), None)
            if message is not None:
                self._recvs.remove(recv)
                self._messages.remove(message)
                recv.write(message)
                self.world_state.finish(recv)


@dataclass(eq=False)
class _PendingCollective(PendingOp):
    """One collective, from the first rank that comes to the last."""

    calls: dict[int, Call] = field(default_factory=dict)

    def perform(self) -> None:
        """Moves the data, or gives every member its exception: others suffer from those who disagree."""
        calls = [self.calls[group_rank] for group_rank in range(len(self.ranks))]
        self.calls.clear()
        try:
            perform(calls, self.ranks)
        except MismatchError as disagreement:
            for group_rank in range(len(self.ranks)):
                at_fault = group_rank in disagreement.at_fault
                self.errors[group_rank] = disagreement.again() if at_fault else PeerGoneError(str(disagreement))
        except Exception as error:
            for group_rank in range(len(self.ranks)):
                self.errors[group_rank] = RuntimeError(f"{self.title}: {type(error).__name__}: {error}")


@dataclass(eq=False)
class _Message:
    source: int
    target: int
    tag: int
    tensor: Tensor


@dataclass(eq=False, kw_only=True)
class PendingRecv(PendingOp):
    """A message that was asked for; `source` is told once it has come."""

    group_rank: int
    source: int | None
    tag: int
    tensor: Tensor

    def accepts(self, message: _Message) -> bool:
        """Tells whether this is the message."""
        return (message.target, message.tag) == (self.group_rank, self.tag) and self.source in (None, message.source)

    def write(self, message: _Message) -> None:
        """Writes the message where it was asked for, if it fits."""
        self.source = message.source
        try:
            check_message(message.tensor, self.tensor, self.ranks[message.source], self.ranks[self.group_rank])
            self.tensor.detach().copy_(message.tensor.reshape(self.tensor.shape))
        except Exception as error:
            self.errors[self.group_rank] = error


def _named(ranks: Sequence[int]) -> str:
    """Names the ranks of a group: `ranks 0..7`, `ranks 0, 4, 8 and 61 more`."""
    if len(ranks) > 2 and tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}..{ranks[-1]}"
    return name_ranks(ranks)
