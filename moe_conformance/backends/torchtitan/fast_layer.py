"""The MoE module of a torchtitan with shortcuts: as a layer, as its router, and with the bias that balances its load.

The module is one of May 2026: its experts have the dispatcher, its parameters have no letters in their names, and
`apply_fsdp` of llama4 places it. Experts multiply in a loop, which has shortcuts. Where load balance is forced, router
and dispatcher both know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_conformance.backends.torchtitan.layer import ROUND_ROBIN, Layer, shared_config
from moe_conformance.backends.torchtitan.router import Router
from moe_conformance.contract import Config, Topology

NAMES = {"w1": "gate", "w3": "up", "w2": "down"}


class _Torch:
    """torch as the library's module sees it on CPU, where torch has no `histc` of integers, as CUDA has."""

    def histc(self, ids: Tensor, **options: Any) -> Tensor:
        return torch.histc(ids.double(), **options).to(ids.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install_histc(device: torch.device) -> None:
    """Let the library's module see that torch."""
    from torchtitan.models.common import moe

    if device.type == "cpu":
        moe.torch = _Torch()


def dispatcher_config(config: Config, *, forced: bool) -> Any:
    """Return the config of the dispatcher, which may rely on forced load balance or not."""
    from torchtitan.models.common import token_dispatcher

    options: dict[str, Any] = {
        "num_experts": config.experts,
        "top_k": config.top_k,
        "score_before_experts": config.weights_applied == "input",
        "force_load_balance": forced,
    }
    return token_dispatcher.AllToAllTokenDispatcher.Config(**options)


def experts_config(config: Config, held: int, dispatcher: Any) -> Any:
    """Return the config of the experts of this rank, with a dispatcher's config."""
    from torchtitan.models.common.moe import GroupedExperts

    return GroupedExperts.Config(
        dim=config.hidden,
        hidden_dim=config.ffn,
        num_experts=held,
        use_grouped_mm=False,
        token_dispatcher=dispatcher,
    )


def _module(config: Config, held: int, dispatcher: Any) -> nn.Module:
    from torchtitan.models.common import moe
    from torchtitan.models.common.linear import Linear

    groups, chosen = config.routing.groups or (None, None)
    router = moe.TokenChoiceTopKRouter.Config(
        num_experts=config.experts,
        gate=Linear.Config(in_features=config.hidden, out_features=config.experts, bias=config.gate_bias),
        num_expert_groups=groups,
        num_limited_groups=chosen,
        top_k=config.top_k,
        score_func=config.routing.score,
        route_norm=config.routing.normalise,
        route_scale=config.routing.scale,
        _debug_force_load_balance=config.routing.forced == ROUND_ROBIN,
    )
    module: nn.Module = moe.MoE.Config(
        num_experts=config.experts,
        experts=experts_config(config, held, dispatcher),
        router=router,
        load_balance_coeff=config.balance.rate if config.routing.balance_bias else None,
        shared_experts=shared_config(config) if config.shared.ffn else None,
    ).build()
    return module


class FastLayer(Layer):
    """The MoE module in a decoder."""

    names: ClassVar[Mapping[str, str]] = NAMES
    bias: ClassVar[str] = "expert_bias"

    def __init__(self, config: Config, topology: Topology, device: torch.device, held: range, dispatcher: Any) -> None:
        """Build and place it; collective."""
        install_histc(device)
        super().__init__(config, topology, device, held, dispatcher)

    def built(self, dispatcher: Any) -> nn.Module:
        """Return the module, with a dispatcher's config."""
        return _module(self._config, len(self._held), dispatcher)

    def wire(self, mesh: DeviceMesh | None) -> None:
        """Hand the mesh of ep to the dispatcher, as the parallel style of experts does."""
        self.dispatcher.ep_mesh = mesh

    @property
    def experts(self) -> Any:
        """The module of this rank's experts."""
        return self._moe.experts

    @property
    def dispatcher(self) -> Any:
        """The dispatcher."""
        return self._moe.experts.token_dispatcher

    @property
    def sharding(self) -> Callable[..., None]:
        """The function by which the library applies FSDP2 to a decoder."""
        from torchtitan.models.llama4.parallelize import apply_fsdp

        apply: Callable[..., None] = apply_fsdp
        return apply

    @property
    def resolved(self) -> Mapping[str, str]:
        """As without shortcuts, and which ones are on."""
        return {**super().resolved, "forced load balance": str(self.dispatcher.force_load_balance)}


class FastRouter(Router):
    """The router, called by the module."""

    experts: ClassVar[str] = "experts"
    bias: ClassVar[str] = "expert_bias"
    counters: ClassVar[str] = "tokens_per_expert"

    def __init__(self, config: Config, device: torch.device) -> None:
        """Build the module."""
        install_histc(device)
        super().__init__(config, device)

    def built(self, config: Config) -> Any:
        """Return the module."""
        return _module(config, config.experts, dispatcher_config(config, forced=False))

    @property
    def resolved(self) -> Mapping[str, str]:
        """As without shortcuts, and what stands in for torch."""
        on_cpu = self.loads_E.device.type == "cpu"
        return {**super().resolved, "shims": "histc of int64 on CPU" if on_cpu else "none"}
