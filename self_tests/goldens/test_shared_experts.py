"""The goldens of shared experts are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from self_tests.chapters.experts.second import SwiGLU
from self_tests.chapters.shared_experts import second as shared_experts
from self_tests.chapters.shared_experts.second import Shared
from self_tests.goldens.golden_twins import assert_twins, given, stored, told


def shared_of(values: Mapping[str, Any]) -> list[Shared]:
    """The stored shared experts."""
    found = [given(values, f"shared-{n}") for n in range(3)]
    return [Shared(SwiGLU(own["gate_FD"], own["up_FD"], own["down_DF"]), own.get("bias_D")) for own in found]


def rows(x_TD: Any, answer: Any) -> Any:
    """One answer for every token."""
    return np.array([answer(x_D) for x_D in x_TD])


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored output."""
        values = stored("shared_experts")
        x_TD, v_D = given(values, "rank-0")["x_TD"], given(values, "shared")["gate_D"]
        shared: Sequence[Shared] = shared_of(values)
        answers = {
            f"h_TD-{n}": rows(x_TD, lambda x_D, h=h: shared_experts.answer(h, x_D)) for n, h in enumerate(shared)
        }
        answers["factors_T"] = rows(x_TD, lambda x_D: shared_experts.factor(x_D, v_D))
        answers["factors-without-gate_T"] = rows(x_TD, lambda x_D: shared_experts.factor(x_D, None))
        answers["part_TD"] = rows(x_TD, lambda x_D: shared_experts.added(x_D, shared, v_D))
        answers["part-without-gate_TD"] = rows(x_TD, lambda x_D: shared_experts.added(x_D, shared, None))
        assert_twins("shared_experts", told("shared", answers))
