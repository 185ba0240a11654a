"""The Disagreement record: what the ledgers of several ranks disagree about, and which ranks are blamed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Disagreement:
    """A call on which the ledgers of the ranks of a group disagree.

    Attributes:
        ranks: The ranks of the group.
        op: The operator that most of the ranks call.
        sequence: 1, 2, ... over the collectives of the group; None for a message.
        blamed: The minority, or the rank that is in all pairs that disagree; if there is neither, all ranks that
            disagree (for a message, both ranks).
        orders: The `Entry.order` of the call, by rank, for the ranks that made it.
        words: What differs.
        absent: Ranks that returned, or wait for ever, without having made the call.
    """

    ranks: tuple[int, ...]
    op: str
    sequence: int | None
    blamed: tuple[int, ...]
    orders: Mapping[int, int]
    words: str
    absent: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.words


def blamed_of_classes(classes: Mapping[int, object]) -> tuple[int, ...]:
    """Returns the ranks outside the largest class; all ranks if two classes are largest."""
    sizes = Counter(classes.values()).most_common()
    (largest, size), others = sizes[0], sizes[1:]
    if others and others[0][1] == size:
        return tuple(sorted(classes))
    return tuple(sorted(rank for rank, its_class in classes.items() if its_class != largest))


def blamed_of_pairs(pairs: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the one rank that is in all pairs that disagree; all their ranks if there is not exactly one."""
    common = set.intersection(*({*pair} for pair in pairs))
    return tuple(common if len(common) == 1 else sorted({rank for pair in pairs for rank in pair}))


def counted(ranks: Sequence[int]) -> tuple[str, bool]:
    """Returns a short text that names the ranks, and True if it names exactly one."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}", True
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} more", False
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}", False
