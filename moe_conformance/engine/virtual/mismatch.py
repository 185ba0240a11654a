"""Who is wrong where ranks that meet do not want the same, and in which words that is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NAMED = 3  # pairs or ranks in a sentence; the others are counted


class MismatchError(RuntimeError):
    """Ranks that met do not want the same; `at_fault` are places in the group, `sentence` says what each wants."""

    def __init__(self, sentence: str, at_fault: frozenset[int]) -> None:
        super().__init__(sentence)
        self.at_fault = at_fault

    def again(self) -> MismatchError:
        """Returns a new one, so that each rank raises its own."""
        return MismatchError(str(self), self.at_fault)


@dataclass(frozen=True)
class Pair:
    """A place that gives something to another that expects something else."""

    source: int
    target: int
    given: str
    expected: str


def disagree(kind: str, pairs: Sequence[Pair], ranks: Sequence[int] | Mapping[int, int]) -> MismatchError:
    """Blames the one place that is in all the pairs; where there is none, or two, all that are in any."""
    common = frozenset.intersection(*(frozenset((pair.source, pair.target)) for pair in pairs))
    everybody = frozenset(group_rank for pair in pairs for group_rank in (pair.source, pair.target))
    said = [
        f"rank {ranks[pair.source]} sends {pair.given} to rank {ranks[pair.target]}, which expects {pair.expected}"
        for pair in pairs[:_NAMED]
    ]
    more = f"; {len(pairs) - _NAMED} more pairs" if len(pairs) > _NAMED else ""
    return MismatchError(f"{kind}: {'; '.join(said)}{more}", common if len(common) == 1 else everybody)


def different(titles: Sequence[str], ranks: Sequence[int]) -> MismatchError:
    """Blames the minority; where there is none, everybody."""
    count = Counter(titles)
    (usual, most), *others = count.most_common()
    tied = not others or others[0][1] == most
    at_fault = frozenset(group_rank for group_rank, title in enumerate(titles) if tied or title != usual)
    said = []
    for title in count:
        there = [rank for rank, each in zip(ranks, titles, strict=True) if each == title]
        said.append(f"{name_ranks(there)} {'is' if len(there) == 1 else 'are'} in {title}")
    return MismatchError(f"ranks of one group are in different calls: {', '.join(said)}", at_fault)


def name_ranks(ranks: Sequence[int]) -> str:
    """Names ranks: `rank 3`, `ranks 3, 4, 5 and 8 more`; nobody is ""."""
    if not ranks:
        return ""
    named = ", ".join(str(rank) for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def elements(tensor: Tensor) -> str:
    """Says how many elements of which dtype."""
    return f"{tensor.numel()} elements of {short(tensor.dtype)}"


def short(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
