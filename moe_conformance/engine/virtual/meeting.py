"""Where virtual ranks wait for each other: the meeting of a collective, the receipt of a message.

Only the rank that has the floor acts here, so that nothing needs a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .disagreement import Disagreement, people
from .moves import Call, check_message, perform
from .notes import Notes
from .turns import Turns


class PeerGoneError(ConnectionError):
    """A peer will not come: it failed, or is at odds with another."""

    def __init__(self, why: str) -> None:
        super().__init__(f"connection closed by peer: {why}")


@dataclass(eq=False)
class Awaited:
    """Something that ranks may wait for.

    Attributes:
        title: What it is, in words.
        ranks: World ranks of the group, by place in it.
        absent: Places without which it cannot be.
        any_will_do: One of the absent is enough.
        done: Nobody has to wait any more.
        errors: The exception for a place, if it is not what it was to be.
        waiting: World ranks that are paused for it.
    """

    title: str
    ranks: tuple[int, ...]
    absent: set[int]
    any_will_do: bool = False
    done: bool = False
    errors: dict[int, Exception] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """What a rank does that waits for this, in words."""
        return f"waits in {self.title}, for {people([self.ranks[place] for place in sorted(self.absent)])}"


class House:
    """What the ranks of a world share: the floor, their halls, who is gone, and what each has noted."""

    def __init__(self, size: int, turns: Turns) -> None:
        self.turns = turns
        self.notes = [Notes() for _ in range(size)]
        self.awaited: dict[int, Awaited] = {}  # by every rank that is paused
        self._size = size
        self._gone: dict[int, str] = {}
        self._halls: dict[tuple[tuple[int, ...], int], Hall] = {}
        self._entered: dict[tuple[tuple[int, ...], int], int] = {}  # how many halls of these ranks a rank was given

    def hall(self, ranks: Sequence[int], rank: int) -> Hall:
        """Returns the hall of a new group of these ranks: all of them make their groups in the same order."""
        members = tuple(ranks) or tuple(range(self._size))
        nth = self._entered.get((members, rank), 0)
        self._entered[members, rank] = nth + 1
        return self._halls.setdefault((members, nth), Hall(self, members, f"group {nth}"))

    def wait(self, awaited: Awaited, place: int) -> None:
        """Pauses a rank until what it waits for is done.

        Raises:
            Disagreement: it and others do not want the same.
            PeerGoneError: somebody without whom it cannot be done is gone.
        """
        rank = awaited.ranks[place]
        while not awaited.done:
            gone = [peer for peer in sorted(awaited.ranks[place] for place in awaited.absent) if peer in self._gone]
            if gone and (not awaited.any_will_do or len(gone) == len(awaited.absent)):
                raise PeerGoneError(self._gone[gone[0]])
            awaited.waiting.append(rank)
            self.awaited[rank] = awaited
            self.turns.pause(rank)
            del self.awaited[rank]
        if place in awaited.errors:
            raise awaited.errors[place]

    def finish(self, awaited: Awaited) -> None:
        """Lets those go on who wait."""
        awaited.done = True
        self._wake(awaited)

    def lose(self, rank: int, why: str) -> None:
        """Takes note that a rank will call nothing any more; who waits for it will not wait for ever."""
        self._gone[rank] = why
        for awaited in {id(each): each for each in self.awaited.values()}.values():
            if any(awaited.ranks[place] == rank for place in awaited.absent):
                self._wake(awaited)

    def _wake(self, awaited: Awaited) -> None:
        self.turns.ready(sorted(awaited.waiting))
        awaited.waiting.clear()


class Hall:
    """The meetings and messages of one group.

    Its name is the same for all members, whatever torch calls the group, and tells groups of the same ranks apart.
    """

    def __init__(self, house: House, ranks: tuple[int, ...], name: str) -> None:
        self.house, self.ranks, self.name = house, ranks, name
        self._calls = [0] * len(ranks)  # made so far, by place
        self._meetings: dict[int, _Meeting] = {}  # by number, until all have come
        self._letters: list[_Letter] = []  # sent and not received
        self._receipts: list[Receipt] = []  # asked for and not sent

    def meet(self, place: int, call: Call) -> Awaited:
        """Takes a rank's part in the collective that is next for it; the last to come moves the data."""
        number = self._calls[place]
        self._calls[place] += 1
        meeting = self._meetings.get(number)
        if meeting is None:
            title = f"{call.title(self.ranks)}, call {number} on {_named(self.ranks)}"
            meeting = self._meetings[number] = _Meeting(title, self.ranks, set(range(len(self.ranks))))
        meeting.calls[place] = call
        meeting.absent.discard(place)
        if not meeting.absent:
            del self._meetings[number]
            meeting.take_place()
            self.house.finish(meeting)
        return meeting

    def send(self, place: int, target: int, tag: int, tensor: Tensor) -> None:
        """Sends a copy, at once: sending waits for nobody."""
        self._letters.append(_Letter(place, target, tag, tensor.detach().clone()))
        self._deliver()

    def receive(self, place: int, source: int | None, tag: int, tensor: Tensor) -> Receipt:
        """Asks for a message from a place, or from any."""
        others = set(range(len(self.ranks))) - {place} if source is None else {source}
        title = f"recv, on {_named(self.ranks)}"
        receipt = Receipt(title, self.ranks, others, source is None, place=place, source=source, tag=tag, tensor=tensor)
        self._receipts.append(receipt)
        self._deliver()
        return receipt

    def _deliver(self) -> None:
        for receipt in list(self._receipts):
            letter = next((letter for letter in self._letters if receipt.takes(letter)), None)
            if letter is not None:
                self._receipts.remove(receipt)
                self._letters.remove(letter)
                receipt.open(letter)
                self.house.finish(receipt)


@dataclass(eq=False)
class _Meeting(Awaited):
    """One collective, from the first rank that comes to the last."""

    calls: dict[int, Call] = field(default_factory=dict)

    def take_place(self) -> None:
        """Moves the data, or gives every member its exception: others suffer from those who disagree."""
        calls = [self.calls[place] for place in range(len(self.ranks))]
        self.calls.clear()
        try:
            perform(calls, self.ranks)
        except Disagreement as disagreement:
            for place in range(len(self.ranks)):
                at_fault = place in disagreement.at_fault
                self.errors[place] = disagreement.again() if at_fault else PeerGoneError(str(disagreement))
        except Exception as error:
            for place in range(len(self.ranks)):
                self.errors[place] = RuntimeError(f"{self.title}: {type(error).__name__}: {error}")


@dataclass(eq=False)
class _Letter:
    source: int
    target: int
    tag: int
    tensor: Tensor


@dataclass(eq=False, kw_only=True)
class Receipt(Awaited):
    """A message that was asked for; `source` is told once it has come."""

    place: int
    source: int | None
    tag: int
    tensor: Tensor

    def takes(self, letter: _Letter) -> bool:
        """Tells whether this is the message."""
        return (letter.target, letter.tag) == (self.place, self.tag) and self.source in (None, letter.source)

    def open(self, letter: _Letter) -> None:
        """Writes the message where it was asked for, if it fits."""
        self.source = letter.source
        try:
            check_message(letter.tensor, self.tensor, self.ranks[letter.source], self.ranks[self.place])
            self.tensor.detach().copy_(letter.tensor.reshape(self.tensor.shape))
        except Exception as error:
            self.errors[self.place] = error


def _named(ranks: Sequence[int]) -> str:
    """Names the ranks of a group: `ranks 0..7`, `ranks 0, 4, 8 and 61 more`."""
    if len(ranks) > 2 and tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}..{ranks[-1]}"
    return people(ranks)
