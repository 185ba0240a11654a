"""FAST: bugs of what takes the place of a shortcut that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.layer.experts import BATCHED, Experts, LoopedExperts
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from self_tests.planted_bugs.plant import EP2_EDP2, SINGLE, Expectation, planted


@planted(Expectation("FAST-15", "own-without-shortcuts", "experts", "y"), layout=SINGLE)
class GateAndUpInTurn(LoopedExperts):
    """Without the shortcut gate and up are taken in the order of their names in another library."""

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        gate_NFD, up_NFD, down_NDF = super()._weights()
        return up_NFD, gate_NFD, down_NDF


@planted(
    Expectation("FAST-15", "own-without-shortcuts", "experts", "was built without batched products, and names it"),
    layout=SINGLE,
)
class NamesTheShortcut(LoopedExperts):
    """What is built in place of the shortcut says that it takes it."""

    @property
    def resolved(self) -> Mapping[str, str]:
        return {**super().resolved, "optional": BATCHED}


@planted(
    Expectation("FAST-15", "own-without-shortcuts", "experts", "batched products", "names nothing in resolved"),
    layout=SINGLE,
)
class ReplacedInSilence(LoopedExperts):
    """The replacement does not say what was built."""

    @property
    def resolved(self) -> Mapping[str, str]:
        return {"experts": "Experts"}


class _DividesLooped(GradientFinisher):
    """Gradients of the replacement are divided by the number of replicas as well."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        modules = list(modules)
        super().finish(modules)
        for module in modules:
            if isinstance(module, LoopedExperts):
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= self.topology.sizes["edp"]


@planted(
    Expectation("FAST-15", "own-without-shortcuts", "finish", "0.500 x the expected value"),
    layout=EP2_EDP2,
    also=(_DividesLooped,),
)
class FallbackAverages(LoopedExperts):
    """The replacement is set up in another way, in which the replicas' gradients are averaged."""


@planted(Expectation("FAST-15", "own-with-shortcuts", "experts", "y"), layout=SINGLE)
class BatchedWithoutGate(Experts):
    """The shortcut leaves the gate out, which shows in forwards without gradients alone."""

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        if torch.is_grad_enabled() or len(set(counts_N)) != 1:
            return super()._run(rows_PD, counts_N)
        parts = zip(rows_PD.split(counts_N), self.up_NFD, self.down_NDF, strict=True)
        return torch.cat([F.linear(F.linear(rows, up_FD), down_DF) for rows, up_FD, down_DF in parts])
