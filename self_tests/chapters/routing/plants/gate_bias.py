"""ROUTE: bugs of the bias of a router's gate, and of the parameters of new routers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Named, Read
from self_tests.planted_bugs.plant import EP2_EDP2, TP2_EP2, Expectation, planted


@planted(Expectation("ROUTE-10", "route-gate-bias-softmax-topk", "route", "rank 0 token", "selected", "instead of"))
class GateWithoutItsBias(Router):
    """The fused gate multiplies by the weight alone."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.to(self.wide), self.router_ED.to(self.wide))


@planted(Expectation("ROUTE-10", "route-gate-bias-softmax-topk", "route", "the weights of rank 0"))
class GateBiasSelectsOnly(Router):
    """The gate bias is taken for an expert bias: it selects, and does not weigh."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.to(self.wide), self.router_ED.to(self.wide))

    def _select(self, scores_TE: Tensor) -> Tensor:
        assert self.gate_bias_E is None or self.config.routing.score == "softmax_topk"
        shift_E = 0 if self.gate_bias_E is None else self.gate_bias_E.detach().to(self.wide)
        return super()._select(scores_TE + shift_E)


@planted(
    Expectation(
        "ROUTE-10", "route-gate-bias-softmax-topk", "finish", "every element of the gate_bias's gradient is zero"
    )
)
class GateBiasIsFrozen(Router):
    """The gate bias is a constant to the backward."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        bias_E = None if self.gate_bias_E is None else self.gate_bias_E.detach().to(self.wide)
        return F.linear(x_TD.to(self.wide), self.router_ED.to(self.wide), bias_E)


@planted(
    Expectation(
        *("ROUTE-10", "route-gate-bias-sigmoid", "finish"),
        *("the gradient of gate_bias on rank 0", "only the tokens of its own rank"),
    ),
    layout=EP2_EDP2,
)
class GateBiasOfOwnTokens(Router):
    """The gradient of the gate bias is not summed over ranks: it is no parameter of the module that is reduced."""

    def _gate_bias(self, device: torch.device) -> nn.Parameter:
        made = super()._gate_bias(device)
        self.hidden_from_the_reduction = [made]
        return made

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (each for each in super().parameters(recurse) if each is not self.gate_bias_E)


@planted(Expectation("ROUTE-10", "route-gate-bias-sigmoid", "route", "do not yield all shards of the gate bias"))
class HalfOfTheGateBias(Router):
    """Once it is written, the first half of the gate bias is all that is named, on every rank."""

    def named(self, read: Read) -> Iterator[Named]:
        for each in super().named(read):
            if each.name == "gate_bias" and bool(self.gate_bias_E.isfinite().all()):
                half_E = each.view[: len(each.view) // 2]
                yield Named("gate_bias", None, half_E, shard=(0, 0, 2))
            else:
                yield each


@planted(
    Expectation("ROUTE-23", "initial-router", "run", "in a new model, router of rank 0 is not finite"),
    real="NVIDIA/Megatron-LM commit 1113758d24 (!2238)",
)
class RouterUninitialised(Router):
    """The fallback belongs to another condition, and the memory of the weight stays as it was allocated."""

    def initialise(self) -> None:
        self.router_ED.data = torch.empty_like(self.router_ED)


@planted(
    Expectation("ROUTE-23", "initial-router", "run", "router of rank 1 differs from that of rank 0"), layout=TP2_EP2
)
class SeedOfTheRank(Router):
    """Every rank seeds what it draws from by its own number."""

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(1 + dist.get_rank())


@planted(
    Expectation("ROUTE-23", "initial-router-gate-bias-bfloat16", "run", "gate_bias of rank 2 differs"), layout=TP2_EP2
)
class GateBiasOfTheReplica(Router):
    """The gate bias alone is drawn, from generators that differ between data parallel groups."""

    @torch.no_grad()
    def initialise(self) -> None:
        super().initialise()
        if self.gate_bias_E is not None:
            drawn = torch.Generator().manual_seed(1 + dist.get_rank() // 2)
            self.gate_bias_E.copy_(torch.randn(self.gate_bias_E.shape, generator=drawn))


@planted(Expectation("ROUTE-23", "initial-router", "run", "router of rank 0 is the same for all experts"))
class RouterOfZeros(Router):
    """The weight begins as zeros, like a bias."""

    @torch.no_grad()
    def initialise(self) -> None:
        self.router_ED.zero_()
