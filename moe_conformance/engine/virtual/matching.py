"""Matches the calls of virtual ranks: collects a collective's calls, and pairs sends with receives.

Only the running thread uses it, so that no locks are needed.
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
    """A rank that is waited for will not come: it failed, or disagrees with others."""

    def __init__(self, why: str) -> None:
        super().__init__(f"connection closed by peer: {why}")


@dataclass(eq=False)
class PendingOp:
    """An operation that ranks may wait for.

    Attributes:
        title: A text that names it.
        ranks: World ranks of the group, by group rank.
        absent: Group ranks whose call is missing.
        any_source: Whether the call of one of them is enough.
        done: Whether no rank has to wait any more.
        errors: The exceptions that waiting for it raises, by group rank.
        waiting: World ranks that wait for it.
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
        """Describes what a rank does that waits for this operation."""
        absent = [self.ranks[group_rank] for group_rank in sorted(self.absent)]
        return f"waits in {self.title}, for {name_ranks(absent)}"


class WorldState:
    """The state that the ranks of a world share: scheduler, groups, ledgers, and which ranks have failed."""

    def __init__(self, size: int, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.recorders = [MemoryRecorder() for _ in range(size)]
        self.pending: dict[int, PendingOp] = {}  # by rank, for every rank that waits
        self._size = size
        self._gone: dict[int, str] = {}
        self._group_states: dict[tuple[tuple[int, ...], int], GroupState] = {}
        self._entered: dict[
            tuple[tuple[int, ...], int], int
        ] = {}  # how many group states of these ranks a rank was given

    def group_state(self, ranks: Sequence[int], rank: int) -> GroupState:
        """Returns the state of a new group; all of its ranks make their groups in the same order."""
        members = tuple(ranks) or tuple(range(self._size))
        nth = self._entered.get((members, rank), 0)
        self._entered[members, rank] = nth + 1
        return self._group_states.setdefault((members, nth), GroupState(self, members, f"group {nth}"))

    def wait(self, pending: PendingOp, group_rank: int) -> None:
        """Suspends a rank until the operation is done.

        Raises:
            MismatchError: its call does not match those of other ranks.
            PeerGoneError: a rank that it needs has failed.
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
        """Marks an operation as done and wakes the ranks that wait for it."""
        pending.done = True
        self._wake(pending)

    def mark_gone(self, rank: int, why: str) -> None:
        """Records that a rank makes no more calls, and wakes the ranks that wait for it."""
        self._gone[rank] = why
        for pending in {id(pending): pending for pending in self.pending.values()}.values():
            if any(pending.ranks[group_rank] == rank for group_rank in pending.absent):
                self._wake(pending)

    def _wake(self, pending: PendingOp) -> None:
        self.scheduler.wake(sorted(pending.waiting))
        pending.waiting.clear()


class GroupState:
    """The pending collectives and messages of one group.

    Its name is the same for all ranks, unlike torch's name of the group, and differs between groups of the same ranks.
    """

    def __init__(self, world_state: WorldState, ranks: tuple[int, ...], name: str) -> None:
        self.world_state, self.ranks, self.name = world_state, ranks, name
        self._calls = [0] * len(ranks)  # collectives called so far, by group rank
        self._collectives: dict[int, _PendingCollective] = {}  # by number, until all ranks have called
        self._messages: list[_Message] = []  # sent and not received yet
        self._recvs: list[PendingRecv] = []  # receives without a message yet

    def collective(self, group_rank: int, call: Call) -> PendingOp:
        """Adds a rank's call to its next collective; the last rank to call performs it."""
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
        """Sends a copy of a tensor, without waiting."""
        self._messages.append(_Message(group_rank, target, tag, tensor.detach().clone()))
        self._match()

    def receive(self, group_rank: int, source: int | None, tag: int, tensor: Tensor) -> PendingRecv:
        """Starts to receive a message from a group rank, or from any if `source` is None."""
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
    """One collective, from the first rank's call to the last."""

    calls: dict[int, Call] = field(default_factory=dict)

    def perform(self) -> None:
        """Performs the collective, or sets every rank's exception: MismatchError for those at fault."""
        calls = [self.calls[group_rank] for group_rank in range(len(self.ranks))]
        self.calls.clear()
        try:
            perform(calls, self.ranks)
        except MismatchError as mismatch:
            for group_rank in range(len(self.ranks)):
                at_fault = group_rank in mismatch.at_fault
                self.errors[group_rank] = mismatch.again() if at_fault else PeerGoneError(str(mismatch))
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
    """A receive; `source` is set once a message has come."""

    group_rank: int
    source: int | None
    tag: int
    tensor: Tensor

    def accepts(self, message: _Message) -> bool:
        """Returns True if this receive matches the message."""
        return (message.target, message.tag) == (self.group_rank, self.tag) and self.source in (None, message.source)

    def write(self, message: _Message) -> None:
        """Copies the message into the receiver's tensor, if its size and dtype match."""
        self.source = message.source
        try:
            check_message(message.tensor, self.tensor, self.ranks[message.source], self.ranks[self.group_rank])
            self.tensor.detach().copy_(message.tensor.reshape(self.tensor.shape))
        except Exception as error:
            self.errors[self.group_rank] = error


def _named(ranks: Sequence[int]) -> str:
    """Returns a text that names a group's ranks: `ranks 0..7`, `ranks 0, 4, 8 and 61 more`."""
    if len(ranks) > 2 and tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}..{ranks[-1]}"
    return name_ranks(ranks)
