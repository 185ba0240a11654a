"""torchtitan's MoE module as a whole layer, with its shared experts, under FSDP2 as the library applies it.

Several shared experts are one of their total width. The placement is `apply_fsdp_to_decoder` itself, on a decoder of
one block with nothing in it but the MoE module: routed experts over edp, all else over dp and cp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_conformance.backends.fsdp_windows import local, require_one_bias, require_parts, shared_windows, whole_window
from moe_conformance.backends.torchtitan.exchange import ep_mesh
from moe_conformance.backends.torchtitan.library import given
from moe_conformance.backends.torchtitan.tensor_parallel import (
    meshes,
    require_over_tp,
    set_sharding,
    shared_windows_over_tp,
)
from moe_conformance.contract import Config, Named, Read, Topology, Unsupported

ROUND_ROBIN = (("round_robin", None),)  # the one strategy that the router forces
CANONICAL = {"w1_EFD": "gate", "w3_EFD": "up", "w2_EDF": "down"}


def moe_config(config: Config, held: int, dispatcher: Any) -> Any:
    """Return the library's config of the MoE module, with N experts on this rank and a dispatcher's config."""
    from torchtitan.models.common import moe as titan
    from torchtitan.models.common.linear import Linear

    E, K = config.experts, config.top_k
    groups, chosen = config.routing.groups or (None, None)
    return titan.MoE.Config(
        num_experts=E,
        routed_experts=titan.RoutedExperts.Config(
            inner_experts=titan.GroupedExperts.Config(dim=config.hidden, hidden_dim=config.ffn, num_experts=held),
            token_dispatcher=dispatcher,
        ),
        router=titan.TokenChoiceTopKRouter.Config(
            num_experts=E,
            gate=Linear.Config(in_features=config.hidden, out_features=E, bias=config.gate_bias),
            num_expert_groups=groups,
            num_limited_groups=chosen,
            top_k=K,
            score_func=config.routing.score,
            route_norm=config.routing.normalise,
            route_scale=config.routing.scale,
            _debug_force_load_balance=config.routing.forced == ROUND_ROBIN,
        ),
        load_balance_coeff=config.balance.rate if config.routing.balance_bias else None,
        shared_experts=shared_config(config) if config.shared.ffn else None,
    )


def shared_config(config: Config) -> Any:
    """Return the config of the shared experts, which are one of their total width."""
    from torchtitan.models.common import feed_forward
    from torchtitan.models.common.linear import Linear

    D, F = config.hidden, sum(config.shared.ffn)
    up = Linear.Config(in_features=D, out_features=F)
    down = Linear.Config(in_features=F, out_features=D, bias=config.shared.bias)
    if not config.shared.gate:
        return feed_forward.FeedForward.Config(w1=up, w2=down, w3=up)
    gate = Linear.Config(in_features=D, out_features=1)
    return feed_forward.SigmoidGatedFeedForward.Config(w1=up, w2=down, w3=up, gate=gate)


class Block(nn.Module):
    """A block of a decoder that has only the MoE module."""

    moe_enabled = True

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the module."""
        y: Tensor = self.moe(x)
        return y


class Decoder(nn.Module):
    """The attributes of a model that `apply_fsdp_to_decoder` reads."""

    enable_weight_tying = False
    tok_embeddings = norm = lm_head = None

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": block})

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        y: Tensor = self.layers["0"](x)
        return y


def require_placed(config: Config, topology: Topology) -> None:
    """Refuse parameters that lie on ranks in parts that no window is on."""
    sizes = topology.sizes
    if sizes["tp"] > 1:
        require_over_tp(config, topology)
    if config.shared.gate and not config.shared.ffn:
        raise Unsupported("torchtitan's gate is one of shared experts, and there are none")
    if config.shared.bias:
        require_one_bias(config.shared.ffn)
    if sizes["tp"] == 1:
        require_parts(config.shared.ffn, sizes["dp"] * sizes["cp"])
    if sizes["dp"] * sizes["cp"] > 1 and config.dtype == torch.float64:
        raise Unsupported("torchtitan keeps and reduces in float32 what FSDP2 shards, not in torch.float64")


class Layer:
    """The MoE module in a decoder; every backward reduces."""

    names: ClassVar[Mapping[str, str]] = CANONICAL
    bias: ClassVar[str] = "expert_bias_E"

    def __init__(self, config: Config, topology: Topology, device: torch.device, held: range, dispatcher: Any) -> None:
        """Build and place it, with a dispatcher's config, where `require_placed` lets it; collective."""
        batches = topology.sizes["dp"] * topology.sizes["cp"]
        self._config, self._topology, self._held = config, topology, held
        self.made: tuple[dist.ProcessGroup, ...] = ()  # groups, which the session destroys
        self._moe: Any = self.built(dispatcher).to(device)
        if topology.sizes["tp"] == 1:
            self.wire(ep_mesh(topology, device))
        self.experts.num_experts = config.experts  # as where the library itself shards them
        for module in self._moe.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                kept = torch.float32 if batches > 1 else config.dtype
                setattr(module, name, nn.Parameter(parameter.detach().to(device, kept)))
        self._decoder: Any = Decoder(Block(self._moe))
        if batches * topology.sizes["tp"] > 1:
            self._shard(device)

    def built(self, dispatcher: Any) -> nn.Module:
        """Return the module, with a dispatcher's config; over tp it has all experts, and is not cut yet."""
        over_tp = self._topology.sizes["tp"] > 1
        config = moe_config(self._config, self._config.experts if over_tp else len(self._held), dispatcher)
        if over_tp:
            set_sharding(config)
        module: nn.Module = config.build()
        return module

    def wire(self, mesh: DeviceMesh | None) -> None:
        """Hand the mesh of ep to the dispatcher."""
        self.dispatcher.wire_meshes(ep_mesh=mesh)

    @property
    def experts(self) -> Any:
        """The module of this rank's experts."""
        return self._moe.routed_experts.inner_experts

    @property
    def dispatcher(self) -> Any:
        """The dispatcher."""
        return self._moe.routed_experts.token_dispatcher

    @property
    def sharding(self) -> Callable[..., None]:
        """The function by which the library applies FSDP2 to a decoder."""
        from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

        apply: Callable[..., None] = apply_fsdp_to_decoder
        return apply

    def _shard(self, device: torch.device) -> None:
        topology = self._topology
        if topology.sizes["tp"] > 1:
            over_tp = meshes(topology, device)
            self._moe.parallelize(over_tp.dims)
            data, experts, self.made = over_tp.data, over_tp.experts, over_tp.made
        else:
            data = DeviceMesh.from_group(topology.group("dp_cp"), device.type, mesh_dim_names=("fsdp",))
            experts = DeviceMesh.from_group(topology.group("edp"), device.type, mesh_dim_names=("efsdp",))
        self.sharding(
            self._decoder,
            dp_mesh=data,
            param_dtype=self._config.dtype,
            reduce_dtype=torch.float32,
            pp_enabled=topology.sizes["pp"] > 1,
            ep_degree=topology.sizes["ep"],
            edp_mesh=experts,
        )
        if device.type == "cpu":
            sum_by_gloo(self._decoder)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes of the parts, and how the experts are placed."""
        weight = next(self.experts.parameters())
        return {
            "layer": type(self._moe).__qualname__,
            "dispatcher": type(self.dispatcher).__qualname__,
            "shared experts": type(self._moe.shared_experts).__qualname__,
            "parameters": str(weight.dtype),
            "shards": str(weight.placements) if isinstance(weight, DTensor) else "none",
        }

    def __call__(self, x: Tensor) -> Tensor:
        """Return y."""
        y: Tensor = self._decoder(given(self._moe, x))
        y = y.to_local() if isinstance(y, DTensor) else y
        return y.reshape(x.shape)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the router, this rank's part of the experts, and of the shared ones the rows that it holds."""
        yield from whole_window("router", self._moe.router.gate.weight, read)
        bias_E = getattr(self._moe, self.bias)
        if bias_E is not None:
            yield Named("balance_bias", None, read(local(bias_E)))
        yield from expert_windows(self.experts, self._held[0], read, self.names)
        shared = self._moe.shared_experts
        if shared is None:
            return
        if self._topology.sizes["tp"] > 1:
            yield from shared_windows_over_tp(shared, self._config, self._topology, read)
            return
        gate_up_FD = (shared.w1.weight, shared.w3.weight)
        yield from shared_windows(gate_up_FD, shared.w2, self._config.shared.ffn, read)
        if self._config.shared.gate:
            yield from whole_window("shared_score", shared.gate.weight, read)


def sum_by_gloo(model: nn.Module) -> None:
    """Have FSDP2 sum gradients plainly: gloo has no premultiplied sum, which it takes even for a factor of one."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def expert_windows(module: Any, first: int, read: Read, names: Mapping[str, str] = CANONICAL) -> Iterator[Named]:
    """Yield the windows on this rank's N experts from the first on: of these FSDP2 keeps some, or a part of each."""
    for name, canonical in names.items():
        parameter = getattr(module, name)
        start, shard = (first, None) if not isinstance(parameter, DTensor) else _place(parameter, first)
        for n, view in enumerate(read(local(parameter))):
            yield Named(canonical, start + n, view, shard)


def _place(parameter: DTensor, first: int) -> tuple[int, tuple[int, int, int] | None]:
    """Return the first expert in this rank's shard, and which part of an expert it is."""
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    axis = names.index("efsdp") if mesh.ndim > 1 else 0
    index, of = mesh.get_local_rank(axis), mesh.size(axis)
    # What ep has cut before is strided, which says of itself that it is no shard.
    if of == 1 or getattr(parameter.placements[axis], "dim", None) == 0:
        held = parameter.shape[0] // (mesh.size(names.index("ep")) if "ep" in names else 1)
        return first + index * -(-held // of), None
    return first, (0, index, of)
