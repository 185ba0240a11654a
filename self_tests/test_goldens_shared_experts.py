"""The goldens of shared experts are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from self_tests.golden_layer import experts_of, stacked, tokens_of
from self_tests.golden_twins import assert_twins, given, stored, told
from self_tests.oracles import shared_experts
from self_tests.oracles.experts import SwiGLU
from self_tests.oracles.shared_experts import Gradients, Shared

LAYERS: Mapping[str, tuple[int, bool, Literal["output", "input"], int]] = {
    "plain": (3, False, "output", 3),
    "gated": (3, True, "output", 1),
    "gated-weights-at-input": (1, True, "input", 2),
    "nothing-shared": (0, True, "output", 3),
}


def shared_of(values: Mapping[str, Any]) -> list[Shared]:
    """The stored shared experts."""
    found = [given(values, f"shared-{n}") for n in range(3)]
    return [Shared(SwiGLU(own["gate_FD"], own["up_FD"], own["down_DF"]), own.get("bias_D")) for own in found]


def named(expert: Shared, before: str = "") -> dict[str, Any]:
    """A shared expert, or its gradients, by the names of its parameters."""
    found = {before + name: matrix for name, matrix in expert.matrices._asdict().items()}
    return found if expert.bias_D is None else found | {f"{before}bias_D": expert.bias_D}


def flat(back: Gradients) -> dict[str, Any]:
    """Outputs and gradients of all ranks, one after the other."""
    found = {"y_TD": back.y, "dx_TD": back.dx, "dweights_TK": back.dweights}
    answers = {name: np.concatenate(parts) for name, parts in found.items()} | stacked(back.routed)
    for n, expert in enumerate(back.shared):
        answers |= named(expert, f"dshared-{n}.")
    return answers if back.gate_D is None else answers | {"dgate_D": back.gate_D}


def of_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The gradients of all ranks together, and of each by itself."""
    ranks = [given(values, f"rank-{rank}") for rank in range(3)]
    batch, upstream = [tokens_of(own) for own in ranks], [own["dy_TD"] for own in ranks]
    routed, shared, v_D = experts_of(values), shared_of(values), given(values, "shared")["gate_D"]
    found = {}
    for case, (S, gated, place, divisor) in LAYERS.items():
        gate_D = v_D if gated else None
        back = shared_experts.backward(batch, routed, shared[:S], gate_D, upstream, place, divisor)
        found |= told(case, flat(back))
    found |= told("nothing", flat(shared_experts.backward(batch[1:2], routed, [], None, upstream[1:2])))
    for rank in range(3):
        own = batch[rank : rank + 1]
        back = shared_experts.backward(own, routed, shared, v_D, upstream[rank : rank + 1])
        (y_TD,) = shared_experts.forward(own, routed, shared, v_D)
        found |= told(f"rank-{rank}", flat(back) | {"forward_TD": y_TD})
    wide = shared_experts.fused(shared)
    (whole,) = shared_experts.backward(batch[:1], routed, [wide], v_D, upstream[:1]).shared
    answers = named(wide) | named(whole, "d.")
    for n, part in enumerate(shared_experts.parts_of_fused(whole, [4, 2, 3])):
        answers |= named(part, f"d{n}.")
    return found | told("fused", answers)


def rows(x_TD: Any, answer: Any) -> Any:
    """One answer for every token."""
    return np.array([answer(x_D) for x_D in x_TD])


def of_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """What experts add, and shards of one."""
    x_TD, v_D = given(values, "rank-0")["x_TD"], given(values, "shared")["gate_D"]
    shared: Sequence[Shared] = shared_of(values)
    answers = {f"h_TD-{n}": rows(x_TD, lambda x_D, h=h: shared_experts.answer(h, x_D)) for n, h in enumerate(shared)}
    answers["factors_T"] = rows(x_TD, lambda x_D: shared_experts.factor(x_D, v_D))
    answers["factors-without-gate_T"] = rows(x_TD, lambda x_D: shared_experts.factor(x_D, None))
    answers["part_TD"] = rows(x_TD, lambda x_D: shared_experts.added(x_D, shared, v_D))
    answers["part-without-gate_TD"] = rows(x_TD, lambda x_D: shared_experts.added(x_D, shared, None))
    shards = shared_experts.shards(shared[0], [[3, 0], [], [1, 2]])
    cut = {"sum_TD": shared_experts.summed(x_TD, shards, shared[0].bias_D)}
    for n, shard in enumerate(shards):
        cut |= named(Shared(shard), f"{n}.")
    return told("shared", answers) | told("shards", cut)


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored output and gradient."""
        values = stored("shared_experts")
        assert_twins("shared_experts", of_layers(values) | of_parts(values))
