"""Tokens per expert and the trace of choices, worked out twice: whole tensors, and one slot at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.overload import counters as first
from self_tests.chapters.overload.second import counters as second
from self_tests.chapters.overload.second.counters import RoutedPass
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)
KINDS = ("forward", "recomputed", "backward", "alone", "evaluation")


def first_passes(passes: Sequence[RoutedPass]) -> list[first.RoutedPass]:
    """Longhand passes as the first oracle takes them."""
    made = []
    for kind, label, ids_TK, padding_T in passes:
        padding = None if padding_T is None else torch.from_numpy(padding_T)
        made.append(first.RoutedPass(kind, label, torch.from_numpy(ids_TK), padding))  # type: ignore[arg-type]
    return made


def first_counts(passes: Sequence[RoutedPass], experts: int) -> list[int]:
    """The first oracle's counts as a list, int64 before."""
    counts = first.expert_counts(first_passes(passes), experts)
    assert (torch.int64, (experts,)) == (counts.dtype, tuple(counts.shape))
    return counts.tolist()


def first_trace(passes: Sequence[RoutedPass]) -> dict[Any, list[set[int]]]:
    """The first oracle's trace as lists of sets."""
    return {label: [set(ids) for ids in tokens] for label, tokens in first.trace(first_passes(passes)).items()}


def routed(kind: str, label: Any, ids: Sequence[Sequence[int]], padding: Sequence[bool] | None = None) -> RoutedPass:
    """A pass of two slots a token, shortly."""
    ids_TK = np.array(ids, dtype=np.int64).reshape(len(ids), 2)
    return RoutedPass(kind, label, ids_TK, None if padding is None else np.array(padding, dtype=np.bool_))


@st.composite
def passes(draw: st.DrawFn, experts: int = 5) -> list[RoutedPass]:
    """Passes of every kind, each label once in training; repeated and empty slots; padding that names nobody."""
    found = []
    for label in range(draw(st.integers(0, 5))):
        hidden = draw(st.lists(st.booleans(), max_size=4))
        ids = [[draw(st.integers(-1, experts + (2 if pad else -1))) for _ in range(2)] for pad in hidden]
        kind = draw(st.sampled_from(KINDS))
        found.append(routed(kind, (label, 0), ids, hidden if any(hidden) or draw(st.booleans()) else None))
    return found


class TestPair:
    @pairs_agree
    @given(passes())
    def test_counts_agree(self, case: list[RoutedPass]) -> None:
        """Both count the same pairs of every expert, those of padding and of other than training passes left out."""
        assert second.expert_counts(case, 5) == first_counts(case, 5)

    @pairs_agree
    @given(passes())
    def test_traces_agree(self, case: list[RoutedPass]) -> None:
        """Both hold the same ids of the same passes, tokens of padding included."""
        assert second.trace(case) == first_trace(case)


CASE = [
    routed("forward", "a", [[0, 2], [2, -1]]),
    routed("evaluation", "b", [[1, 1]]),
    routed("alone", "c", [[2, 2], [3, 0]], [False, True]),
    routed("recomputed", "a", [[0, 2], [2, -1]]),
    routed("backward", "a", [[0, 2], [2, -1]]),
    routed("forward", "d", []),
]

test_by_hand = by_hand(
    *rows(first_counts, second.expert_counts,
        ("padding, evaluation and repeats do not count", (CASE, 4), [1, 0, 4, 0]),
        ("an expert that is not there", ([routed("forward", 0, [[0, 3]])], 3), REFUSED),
        ("an id below -1", ([routed("alone", 0, [[0, -2]])], 3), REFUSED),
        ("an expert that is not there, beside padding", ([routed("forward", 0, [[0, 3], [1, 4]], [True, False])], 3),
         REFUSED),
        ("no expert at all", ([routed("forward", 0, [])], 0), REFUSED),
        ("ids of one dim", ([RoutedPass("forward", 0, np.zeros(2, dtype=np.int64))], 3), REFUSED),
        ("ids of 32 bits", ([RoutedPass("forward", 0, np.zeros((1, 2), dtype=np.int32))], 3), REFUSED),
        ("padding of another T", ([routed("forward", 0, [[0, 1]], [True, False])], 3), REFUSED),
        ("padding that is not bool", ([RoutedPass("forward", 0, np.zeros((1, 2), np.int64), np.zeros(1, np.int64))], 3),
         REFUSED),
    ),
    *rows(first_trace, second.trace,
        ("every forward pass has one record", (CASE,), {"a": [{0, 2}, {2}], "b": [{1}], "c": [{2}, {0, 3}], "d": []}),
        *(
            (f"{one} and {other} of one label", ([routed(kind, 7, [[0, 1]]) for kind in (one, other)],), REFUSED)
            for one, other in [("forward", "forward"), ("alone", "forward"), ("evaluation", "alone")]
        ),
    ),
)  # fmt: skip
