"""The exception for calls of ranks that do not match, its wording, and which ranks it blames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NAMED = 3  # pairs or ranks that a sentence names; the others are counted


class MismatchError(RuntimeError):
    """Ranks of a group make calls that do not match; `at_fault` are group ranks."""

    def __init__(self, sentence: str, at_fault: frozenset[int]) -> None:
        super().__init__(sentence)
        self.at_fault = at_fault

    def again(self) -> MismatchError:
        """Returns a copy, so that each rank raises another object."""
        return MismatchError(str(self), self.at_fault)


@dataclass(frozen=True)
class Pair:
    """A source that sends, and a target that expects, different data; both are group ranks."""

    source: int
    target: int
    given: str
    expected: str


def disagree(kind: str, pairs: Sequence[Pair], ranks: Sequence[int] | Mapping[int, int]) -> MismatchError:
    """Returns a MismatchError that blames the one group rank in all pairs; all ranks if there is not exactly one."""
    common = frozenset.intersection(*(frozenset((pair.source, pair.target)) for pair in pairs))
    all_ranks = frozenset(group_rank for pair in pairs for group_rank in (pair.source, pair.target))
    phrases = [
        f"rank {ranks[pair.source]} sends {pair.given} to rank {ranks[pair.target]}, which expects {pair.expected}"
        for pair in pairs[:_NAMED]
    ]
    more = f"; {len(pairs) - _NAMED} more pairs" if len(pairs) > _NAMED else ""
    return MismatchError(f"{kind}: {'; '.join(phrases)}{more}", common if len(common) == 1 else all_ranks)


def different(titles: Sequence[str], ranks: Sequence[int]) -> MismatchError:
    """Returns a MismatchError that blames the minority; all ranks if there is none."""
    count = Counter(titles)
    (usual, most), *others = count.most_common()
    tied = not others or others[0][1] == most
    at_fault = frozenset(group_rank for group_rank, title in enumerate(titles) if tied or title != usual)
    phrases = []
    for title in count:
        callers = [rank for rank, called in zip(ranks, titles, strict=True) if called == title]
        phrases.append(f"{name_ranks(callers)} {'is' if len(callers) == 1 else 'are'} in {title}")
    return MismatchError(f"ranks of one group are in different calls: {', '.join(phrases)}", at_fault)


def name_ranks(ranks: Sequence[int]) -> str:
    """Returns a text that names ranks: `rank 3`, `ranks 3, 4, 5 and 8 more`; "" for no ranks."""
    if not ranks:
        return ""
    named = ", ".join(str(rank) for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def elements(tensor: Tensor) -> str:
    """Returns a text with the number of elements and the dtype of a tensor."""
    return f"{tensor.numel()} elements of {short(tensor.dtype)}"


def short(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
