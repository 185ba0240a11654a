"""One thing that the ledgers of several ranks disagree about, and who is blamed for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Disagreement:
    """A call that does not fit together.

    Attributes:
        ranks: Of the group on which it is made.
        op: The call, as most of the ranks make it.
        sequence: 1, 2, ... over the collectives of the group; None for a message.
        blamed: The minority, or the rank that is part of all that does not fit; where neither can be told, all ranks
            that disagree: two of them for one message.
        orders: Where each rank's ledger holds the call, by rank, of those that made it.
        words: What differs.
        absent: Ranks that came to their end, or to where they wait for ever, without the call.
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
    """Returns the ranks outside the largest class; all, if no class is the largest alone."""
    sizes = Counter(classes.values()).most_common()
    (largest, size), others = sizes[0], sizes[1:]
    if others and others[0][1] == size:
        return tuple(sorted(classes))
    return tuple(sorted(rank for rank, its in classes.items() if its != largest))


def blamed_of_pairs(pairs: Collection[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the rank that is part of all pairs that disagree; all of their ranks, if there is no such or two."""
    common = set.intersection(*({*pair} for pair in pairs))
    return tuple(common if len(common) == 1 else sorted({rank for pair in pairs for rank in pair}))


def counted(ranks: Sequence[int]) -> tuple[str, bool]:
    """Names ranks, in few words even if they are many, and tells whether it is one."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}", True
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} more", False
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}", False
