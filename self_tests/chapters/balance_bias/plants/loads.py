"""BIAS: bugs in what is counted: padding, drops, evaluation, recomputation, forced routes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from moe_conformance.backends.native.router.balancing import BalancingRouters
from moe_conformance.contract import Claims, Routed
from self_tests.planted_bugs.plant import EP2, SINGLE, Expectation, planted

# ---- padding and drops -----------------------------------------------------------------------------------------------


@planted(Expectation("BIAS-05", "bias-padding", "finish", "likely cause: padding tokens are counted"), layout=SINGLE)
class PaddingMovesTheBias(BalancingRouters):
    """The router is not told of padding, which is left out behind it."""

    def route(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Routed:
        return super().route(number, x, None)


@planted(Expectation("BIAS-05", "bias-padding", "finish", "likely cause: the padding mask is inverted"), layout=EP2)
class MaskInvertedForTheBias(BalancingRouters):
    """True marks tokens that count, as docstrings of Megatron-Core state."""

    def route(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Routed:
        return super().route(number, x, None)

    def load(self, routed: Routed, padding_mask_T: Tensor | None) -> Tensor:
        ids_TK = routed.routing.ids_TK if padding_mask_T is None else routed.routing.ids_TK[padding_mask_T]
        return torch.bincount(ids_TK.flatten(), minlength=self.config.experts)


@planted(
    Expectation("BIAS-05", "bias-dropped-padded", "finish", "likely cause: rows of padding to capacity are counted"),
    layout=SINGLE,
)
class CapacityCounted(BalancingRouters):
    """With padding to capacity every expert has as many rows, and these are counted."""

    def load(self, routed: Routed, padding_mask_T: Tensor | None) -> Tensor:
        load_E = super().load(routed, padding_mask_T)
        return load_E.max().expand_as(load_E) if self.config.capacity.padded else load_E


@planted(
    Expectation(
        "BIAS-05", "bias-dropped", "finish", "loads are counted after drops, and Claims.balance_loads is 'selected'"
    ),
    layout=SINGLE,
)
class CountedAfterDrops(BalancingRouters):
    """Slots that were dropped do not count, and nothing says so."""

    def load(self, routed: Routed, padding_mask_T: Tensor | None) -> Tensor:
        ids_TK = routed.routing.ids_TK
        return torch.bincount(ids_TK[ids_TK >= 0], minlength=self.config.experts)


# ---- forwards that do not train --------------------------------------------------------------------------------------


@planted(
    Expectation("BIAS-06", "bias-evaluation", "finish", "forwards in evaluation and without gradients are counted"),
    real="pytorch/torchtitan commit c4dff1335 (#4148)",
    layout=SINGLE,
)
class AllCounted(BalancingRouters):
    """Every forward counts, whatever its mode."""

    def counts(self) -> bool:
        return not self.config.routing.forced


@planted(
    Expectation("BIAS-06", "bias-evaluation", "finish", "likely cause: forwards in evaluation are counted"), layout=EP2
)
class EvaluationMovesTheBias(BalancingRouters):
    """A forward counts wherever gradients are recorded."""

    def counts(self) -> bool:
        return torch.is_grad_enabled() and not self.config.routing.forced


@planted(
    Expectation("BIAS-06", "bias-evaluation", "finish", "likely cause: forwards without gradients are counted"),
    real="NVIDIA/Megatron-LM commit 481efd020e (#4433)",
    layout=SINGLE,
)
class WarmUpCounted(BalancingRouters):
    """A forward counts in training mode, also one that a warm-up runs without gradients."""

    def counts(self) -> bool:
        return self.training and not self.config.routing.forced


@planted(
    Expectation("BIAS-06", "bias-recomputed", "finish", "the forward that recomputation runs again is counted too"),
    real="pytorch/torchtitan commit 2bfcdd8e1 (#1593)",
    layout=SINGLE,
)
class RecomputedTwice(BalancingRouters):
    """The counter is a part of what is recomputed."""

    def _one(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Routed:
        with set_checkpoint_early_stop(False):  # as where more than the router is recomputed
            return super()._one(number, x, padding_mask_T)

    def route(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Routed:
        routed = super().route(number, x, padding_mask_T)
        if self.counts():
            self.loads_LE[number] += self.load(routed, padding_mask_T)
        return routed

    def count(self, number: int, load_E: Tensor) -> None:
        return


# ---- forced routes ---------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "BIAS-07", "bias-forced-dealt", "finish", "while routing is forced", "Claims.forced_loads is 'ignored'"
    ),
    Expectation("BIAS-07", "bias-forced-random", "finish", "changed the bias of router 0 while routing is forced"),
    layout=SINGLE,
)
class ForcedCounted(BalancingRouters):
    """Forced loads count as others do, and nothing says so."""

    def counts(self) -> bool:
        return self.training and torch.is_grad_enabled()


@planted(
    Expectation("BIAS-07", "bias-forced-dealt", "finish", "the counters of router 0", "forced loads are counted"),
    layout=EP2,
)
class ForcedCountedForLater(BalancingRouters):
    """Forced loads are counted and wait for the first update after forcing has ended."""

    def counts(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def update(self) -> None:
        if not self.config.routing.forced:
            super().update()


@planted(Expectation("BIAS-07", "bias-forced-dealt", "finish", "update 0 of step 0"), layout=SINGLE)
class ForcedLoadsClaimed(BalancingRouters):
    """Forced loads are claimed to count, and none of them is counted."""

    @property
    def claims(self) -> Claims:
        """Claim what does not happen."""
        return Claims(forced_loads="counted")
