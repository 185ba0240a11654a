"""torchtitan's router, which its MoE module calls.

T tokens, K slots, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_conformance.backends.fsdp_windows import whole_window
from moe_conformance.backends.torchtitan import replicas
from moe_conformance.backends.torchtitan.layer import ROUND_ROBIN, moe_config
from moe_conformance.backends.torchtitan.library import given
from moe_conformance.contract import Config, Named, Read, Routed, Routing, Topology, Unsupported


def require_routed(config: Config) -> None:
    """Refuse routing that the router does not have."""
    if config.routing.score not in ("softmax", "sigmoid"):
        raise Unsupported(f"torchtitan's router scores by softmax or sigmoid, not {config.routing.score}")
    if config.routing.group_score != "top2_sum":
        raise Unsupported(f"torchtitan ranks groups by their two best experts, not by {config.routing.group_score}")
    if config.routing.forced not in ((), ROUND_ROBIN):
        raise Unsupported(f"torchtitan's router forces round robin, and nothing else: not {config.routing.forced}")


def _nothing() -> None:
    """Reduce nothing: there are no replicas."""


class _Tap(nn.Module):
    """Replaces the routed experts and keeps what they would receive."""

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts_E: Tensor, shared_experts: None = None) -> Tensor:
        self.handed = (scores, ids, counts_E)
        return x


class Router:
    """The router of an MoE layer, called by the layer, which adds the balance bias and counts the load."""

    experts: ClassVar[str] = "routed_experts"  # attributes of the MoE module
    bias: ClassVar[str] = "expert_bias_E"
    counters: ClassVar[str] = "tokens_per_expert_E"

    def __init__(self, config: Config, device: torch.device) -> None:
        layer, self._tap = self.built(config), _Tap()
        setattr(layer, self.experts, self._tap)
        layer.router.to(config.dtype)  # the bias stays in float32, as the library registers it
        self._layer = layer.to(device)
        self._logits: Tensor | None = None
        layer.router.gate.register_forward_hook(self._keep_logits)
        self._reduce: Callable[[], None] | None = None

    def replicate(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Shard the parameters over the ranks of dp and cp, as the library does; collective.

        Where windows could not be on the shards, or FSDP2 would not keep the dtype, parameters stay as they are, and
        gradients cannot be reduced. Nor can they over tp, which needs the sharding configs of the whole module.
        """
        group = topology.group("dp_cp")
        if topology.sizes["tp"] > 1 or config.experts % group.size() or config.dtype == torch.float64:
            return
        if group.size() == 1:
            self._reduce = _nothing
            return
        self._layer.router.float()
        replicas.shard(
            self._layer,
            DeviceMesh.from_group(group, device.type, mesh_dim_names=("fsdp",)),
            config.dtype,
        )
        self._reduce = partial(replicas.reduce, self._layer, topology, device)

    def reduce(self) -> None:
        """Reduce gradients as the pipeline schedules do after the last backward."""
        if self._reduce is None:
            raise Unsupported("the reduction of this router's gradients is not adapted: tp, float64 or unequal shards")
        self._reduce()

    def built(self, config: Config) -> Any:
        """Return the MoE module."""
        from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

        dispatcher = LocalTokenDispatcher.Config(num_experts=config.experts, top_k=config.top_k)
        return moe_config(config, config.experts, dispatcher).build()

    @property
    def layer(self) -> nn.Module:
        """The MoE module."""
        layer: nn.Module = self._layer
        return layer

    @property
    def loads_E(self) -> Tensor:
        """The counters of the MoE module."""
        loads_E: Tensor = getattr(self._layer, self.counters)
        return loads_E

    def _keep_logits(self, _module: nn.Module, _inputs: object, logits: Tensor) -> None:
        self._logits = logits

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, and the dtypes of its weight and of its logits as far as they were seen."""
        router = self._layer.router
        return {
            "router": type(router).__qualname__,
            "gate": str(router.gate.weight.dtype),
            "logits": str(None if self._logits is None else self._logits.dtype),
            "forced": "round_robin" if router._debug_force_load_balance else "none",
        }

    def __call__(self, x: Tensor) -> Routed:
        """Return what the router hands to the routed experts."""
        self._layer(given(self._layer, x))
        scores, ids, counts_E = self._tap.handed
        assert self._logits is not None  # the layer has just called its gate
        K, E = scores.shape[-1], self._logits.shape[-1]
        routing = Routing(ids.reshape(-1, K), scores.reshape(-1, K), E)
        return Routed(routing, self._logits.reshape(-1, E), counts_E)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the gate's weight, and the biases that there are."""
        gate = self._layer.router.gate
        yield from whole_window("router", gate.weight, read)
        if gate.bias is not None:
            yield from whole_window("gate_bias", gate.bias, read)
        bias_E = getattr(self._layer, self.bias)
        if bias_E is not None:
            yield Named("balance_bias", None, read(bias_E))
