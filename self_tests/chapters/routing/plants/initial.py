"""ROUTE: bugs of the parameters of new routers."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

import torch
import torch.distributed as dist

from moe_conformance.backends.native.router.routing import Router
from self_tests.planted_bugs.plant import TP2_EP2, Expectation, planted


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
