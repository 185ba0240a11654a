"""The parameters of experts of a new model, looked at twice: by groups of replicas, and part beside part."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference import experts as first
from self_tests.chapters.experts import second

pairs_agree = settings(max_examples=100, deadline=None, derandomize=True)
numbers = st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.0, math.nan, math.inf])


@st.composite
def held(draw: st.DrawFn) -> list[second.NewPart]:
    """Parts of up to three experts, whole or halves, on up to two stages, with few values, so that many are equal."""
    parts = []
    for _ in range(draw(st.integers(0, 6))):
        size = draw(st.sampled_from([(1, 2), (2, 2), (0, 2)]))
        value = np.array(draw(st.lists(numbers, min_size=4, max_size=4)), dtype=np.float32)[: size[0] * size[1]]
        name = draw(st.sampled_from(["gate", "up", "down", "bias"]))
        shard = draw(st.sampled_from([None, (0, 0, 2), (0, 1, 2)]))
        stage, expert = draw(st.integers(0, 1)), draw(st.integers(0, 2))
        parts.append(second.NewPart(stage, name, expert, shard, value.reshape(size)))
    return parts


def found_by_first(parts: list[second.NewPart]) -> list[first.Problem]:
    """What the first oracle lists of the same parts, each on a rank of its own."""
    return first.problems(
        [first.Part(n, *part[:4], torch.from_numpy(part.value.copy())) for n, part in enumerate(parts)]
    )


class TestInitialPair:
    @pairs_agree
    @given(held())
    def test_both_find_the_same_wrong(self, parts: list[second.NewPart]) -> None:
        """Each finds the same parts that are not finite, constant, other than a replica or equal, each once."""
        found = found_by_first(parts)
        assert second.new_problems(parts) == {(each.kind, each.part, each.other) for each in found}
        assert len(found) == len(set(found))


class TestDtypes:
    def test_a_replica_of_another_dtype_differs(self) -> None:
        """The same number in another dtype is another parameter."""
        wide, narrow = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
        parts = [first.Part(rank, 0, "up", 0, None, value) for rank, value in enumerate((wide, narrow))]
        assert [first.Problem("replica differs", 1, 0)] == first.problems(parts)
