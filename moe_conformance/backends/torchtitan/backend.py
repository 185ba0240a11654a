"""The backend's name, variants and limits, and its session. Importing this module does not import torchtitan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from moe_conformance.backends.library import Library
from moe_conformance.backends.torchtitan.balance import BalancingRouters, require_balanced
from moe_conformance.backends.torchtitan.config_rules import ConfigRules
from moe_conformance.backends.torchtitan.layer import ROUND_ROBIN, Layer, expert_windows, require_placed
from moe_conformance.backends.torchtitan.router import Router
from moe_conformance.backends.torchtitan.rows import CombineAdd, Permutation, Reordering, ScatterAdd
from moe_conformance.contract import (
    Claims,
    Config,
    Delivery,
    Limit,
    Named,
    Packing,
    Parametrised,
    Read,
    Routing,
    Session,
    TokenPadding,
    Topology,
    TrainingRouters,
    Unsupported,
)

_INSTALL = "pip install --no-deps torchtitan spmd_types triton tyro docstring_parser torchao"
_DISPATCHERS = {
    "local": "LocalTokenDispatcher",
    "alltoall": "AllToAllTokenDispatcher",
    "torchao": "TorchAOTokenDispatcher",
}


class TorchTitan:
    """The published torchtitan; on CPU ranks over gloo or on GPUs."""

    name: ClassVar[str] = "torchtitan"
    variants: ClassVar[tuple[str, ...]] = tuple(_DISPATCHERS)
    preload: ClassVar[tuple[str, ...]] = (
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torchtitan.models.common.moe",
        "torchtitan.models.common.token_dispatcher",
    )
    # torchao finds its permutation by a Triton kernel, which has no CPU target: Triton's interpreter runs it.
    library: ClassVar[Library] = Library(
        "torchtitan", "torchtitan", ">=0.2.2,<0.4", _INSTALL,
        lambda folder: (folder / "assets" / "version.txt").read_text().strip(),
    )  # fmt: skip
    environment: ClassVar[Mapping[str, str]] = {"TRITON_INTERPRET": "1"}

    def versions(self) -> Mapping[str, str]:
        """Versions of torchtitan and of what it computes with; torchao's only where it is installed."""
        if find_spec("spmd_types") is None:
            raise Unsupported(f"spmd_types is not installed: {_INSTALL}")
        packages = ("spmd_types", "torch", *(("torchao",) if find_spec("torchao") else ()))
        return {"torchtitan": self.library.version()} | {package: version(package) for package in packages}

    def limits(self, variant: str) -> Sequence[Limit]:
        """No variant has a value for an empty slot, or checks its input."""
        del variant
        reason = "the dispatchers sort all T * K slots by expert id, and an id names an expert; none means `nowhere`"
        trust = "nothing is checked: what one rank raises leaves the others waiting, and other sizes abort the process"
        return (
            Limit("dropped_slots", (False,), reason, proof="undefined"),
            Limit("wrong_use", (False,), trust, proof="undefined"),
        )

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session on the suite's groups; the library itself keeps one global, its SPMD setting."""
        self.versions()
        from torchtitan.distributed import utils

        return _Session(topology, device, utils)


class _Session(Session):
    def __init__(self, topology: Topology, device: torch.device, utils: Any) -> None:
        self._topology, self._device, self._utils = topology, device, utils
        self._setting = utils.get_spmd_backend()
        utils.set_spmd_backend("partial_dtensor")

    def exchange(self, config: Config) -> _Exchange:
        """Build a dispatcher and wire it to this rank's ep group; it takes any T, also packed."""
        config.only(
            "variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied", "padding.packed", "sharding"
        )
        if config.weights_applied == "input":
            raise Unsupported("torchtitan 0.3 applies the scores after the experts only, not weights_applied='input'")
        first, held = _placement(self._topology, config)
        return _Exchange(_dispatcher(config, self._topology, self._device), range(first, first + held))

    def experts(self, config: Config) -> _Experts:
        """Build this rank's GroupedExperts; FSDP2 shards them where they are replicated."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied", "sharding")
        if config.sharding == "gradients":
            raise Unsupported("torchtitan shards parameters over replicas by FSDP2, and never gradients alone")
        _require_rows(config)
        first, held = _placement(self._topology, config)
        if len(self._topology.ranks("edp")) > 1 and config.dtype == torch.float64:
            raise Unsupported("torchtitan keeps and reduces in float32 what FSDP2 shards, not in torch.float64")
        return _Experts(config, first, held, self._topology, self._device)

    def router(self, config: Config) -> Router:
        """Build an MoE layer and replace its routed experts: what they would receive is the routing."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "routing", "gate_bias", "router_dtype")
        _require_routed(config)
        if config.router_dtype not in (None, torch.float32):
            raise Unsupported(f"torchtitan 0.3 computes gate and scores in float32, not in {config.router_dtype}")
        if config.router_dtype == torch.float32 != config.dtype and self._device.type == "cpu":
            raise Unsupported("torchtitan casts its gate by autocast to float32, which torch switches off on CPU")
        return Router(config, self._device)

    def training_routers(self, config: Config) -> TrainingRouters:
        """Refuse: routers have no losses."""
        del config
        raise Unsupported("torchtitan 0.3 has no loss of routers: their load is balanced by an expert bias alone")

    def balancing_routers(self, config: Config) -> BalancingRouters:
        """Build the MoE modules of a model as for their routers, and register the hook that updates their biases."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "routing", "balance")
        _require_routed(config)
        require_balanced(config, self._topology)
        routers = [Router(config, self._device) for _ in range(config.balance.layers)]
        return BalancingRouters(routers, [router.layer for router in routers], self._topology, self._device)

    def config_rules(self, config: Config) -> ConfigRules:
        """Resolve settings on one rank."""
        if self._topology.sizes["world"] > 1:
            raise Unsupported("the adapter resolves settings on one rank")
        return ConfigRules(config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype"))

    def layer(self, config: Config) -> Layer:
        """Build an MoE module with a dispatcher on this rank's ep group; FSDP2 shards it where it is replicated."""
        config.only(
            "variant",
            "experts",
            "top_k",
            "hidden",
            "ffn",
            "dtype",
            "routing",
            "shared.ffn",
            "shared.gate",
            "shared.bias",
        )
        _require_routed(config)
        _require_rows(config)
        first, held = _placement(self._topology, config)
        require_placed(config, self._topology)
        dispatcher = _dispatcher_config(config, self._topology)
        return Layer(config, self._topology, self._device, range(first, first + held), dispatcher)

    def permutation(self, config: Config) -> Permutation:
        """Build a dispatcher that sends nothing; torchao's pads."""
        config.only("variant", "experts", "top_k", "hidden", "dtype", "padding.row_multiple")
        if config.padding.row_multiple > 1 and find_spec("torchao") is None:
            raise Unsupported(f"rows are padded by torchao: {_INSTALL}")
        return Permutation(config)

    def scatter_add(self, config: Config) -> ScatterAdd:
        """Return the operator that adds rows back."""
        config.only("variant", "hidden", "dtype")
        return ScatterAdd()

    def combine_add(self, config: Config) -> CombineAdd:
        """Return the operator that adds rows back, for the output of shared experts."""
        config.only("variant", "hidden", "dtype")
        return CombineAdd()

    def reordering(self, config: Config) -> Reordering:
        """Build the all-to-all dispatcher."""
        return Reordering(config.only("variant", "experts", "top_k", "hidden", "dtype"))

    def packing(self, config: Config) -> Packing:
        """Refuse: nothing lays sequences out."""
        del config
        raise Unsupported("torchtitan 0.3 reads documents off positions that begin anew: it lays out no lengths")

    def token_padding(self, config: Config) -> TokenPadding:
        """Refuse: T is taken as it is."""
        del config
        raise Unsupported("torchtitan 0.3 pads the rows of experts, and no rank's tokens")

    def finish_gradients(self, *built: Parametrised) -> None:
        """Reduce the experts' gradients over their replicas, as the pipeline schedules do after the last backward."""
        for surface in built:
            if isinstance(surface, Layer):  # FSDP2 has reduced in every backward
                continue
            if not isinstance(surface, _Experts):
                raise Unsupported(f"the reduction of {type(surface).__name__}'s gradients is not adapted")
            surface.reduce()

    def close(self) -> None:
        """Restore the library's global."""
        self._utils.set_spmd_backend(self._setting)


def _require_routed(config: Config) -> None:
    """Refuse routing that the router does not have."""
    if config.routing.score not in ("softmax", "sigmoid"):
        raise Unsupported(f"torchtitan's router scores by softmax or sigmoid, not {config.routing.score}")
    if config.routing.group_score != "top2_sum":
        raise Unsupported(f"torchtitan ranks groups by their two best experts, not by {config.routing.group_score}")
    if config.routing.forced not in ((), ROUND_ROBIN):
        raise Unsupported(f"torchtitan's router forces round robin, and nothing else: not {config.routing.forced}")


def _require_rows(config: Config) -> None:
    """Refuse sizes that the experts' matrix product does not take."""
    for size in (config.hidden, config.ffn):
        if size % 8:
            raise Unsupported(f"torch's grouped matmul needs rows of a multiple of 8 bfloat16, not {size}")


def _placement(topology: Topology, config: Config) -> tuple[int, int]:
    """Return (first expert, N) of this rank, or refuse a layout that torchtitan does not have."""
    if topology.sizes["etp"] > 1:
        raise Unsupported(
            f"etp = {topology.sizes['etp']}: torchtitan shards experts over tensor ranks only without expert "
            "parallelism, and then every tp rank has the same tokens"
        )
    ep = topology.ranks("ep")
    if config.experts < 1 or config.experts % len(ep):
        raise Unsupported(f"torchtitan gives every rank the same number of experts: {config.experts} on ep = {len(ep)}")
    held = config.experts // len(ep)
    return ep.index(topology.rank) * held, held


# ---- dispatchers ---------------------------------------------------------------------------------------------


def _dispatcher_config(config: Config, topology: Topology) -> Any:
    if config.variant not in _DISPATCHERS:
        raise Unsupported(f"variant {config.variant!r} is not one of {', '.join(_DISPATCHERS)}")
    ep = len(topology.ranks("ep"))
    if config.variant == "local" and ep > 1:
        raise Unsupported(f"the local dispatcher has no expert parallelism: ep = {ep}")
    if config.variant == "torchao" and find_spec("torchao") is None:
        raise Unsupported(f"the torchao variant needs torchao: {_INSTALL}")
    from torchtitan.models.common import token_dispatcher

    # 16: to what the library itself pads for its float8 experts.
    padding = {"pad_multiple": 16} if config.variant == "torchao" else {}
    chosen = getattr(token_dispatcher, _DISPATCHERS[config.variant])
    return chosen.Config(num_experts=config.experts, top_k=config.top_k, **padding)


def _dispatcher(config: Config, topology: Topology, device: torch.device) -> Any:
    built, ep = _dispatcher_config(config, topology).build(), topology.group("ep")
    mesh = DeviceMesh.from_group(ep, device.type, mesh_dim_names=("ep",)) if ep.size() > 1 else None
    built.wire_meshes(ep_mesh=mesh)
    return built


class _Exchange:
    """A dispatcher; all of its state goes into the handle."""

    def __init__(self, dispatcher: Any, local_experts: range) -> None:
        self._dispatcher, self._experts = dispatcher, local_experts

    @property
    def local_experts(self) -> tuple[int, ...]:
        return tuple(self._experts)

    @property
    def resolved(self) -> Mapping[str, str]:
        mesh = getattr(self._dispatcher, "ep_mesh", None)
        return {
            "dispatcher": type(self._dispatcher).__qualname__,
            "path": "local" if mesh is None else f"all_to_all over {mesh.size()} ranks",
        }

    @property
    def claims(self) -> Claims:
        return Claims(multiple=getattr(self._dispatcher, "pad_multiple", 1))

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        x_TD = x.reshape(-1, x.shape[-1])
        counts_E = torch.bincount(routing.ids_TK.reshape(-1), minlength=routing.experts)
        rows_RD, counts_N, metadata = self._dispatcher.dispatch(x_TD, routing.weights_TK, routing.ids_TK, counts_E)
        return Delivery.grouped(rows_RD, counts_N), (metadata, x_TD, x.shape)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        metadata, x_TD, shape = handle
        y_TD: Tensor = self._dispatcher.combine(rows, metadata, x_TD)
        return y_TD.reshape(shape)


# ---- experts -------------------------------------------------------------------------------------------------


class _Experts:
    """GroupedExperts of this rank's N experts, under FSDP2 where edp > 1.

    FSDP2 shards float32 parameters and casts them for every use, as the library's mixed precision has it. Microbatches
    accumulate without reduction until `reduce`; a rank's own gradient can be read before it in float32 alone.
    """

    def __init__(self, config: Config, first: int, held: int, topology: Topology, device: torch.device) -> None:
        from torchtitan.models.common.moe import GroupedExperts

        built = GroupedExperts.Config(dim=config.hidden, hidden_dim=config.ffn, num_experts=held).build()
        self._first, self._topology, self._device = first, topology, device
        self._edp = topology.ranks("edp")
        self._module: nn.Module = built.to(device, torch.float32 if len(self._edp) > 1 else config.dtype)
        if len(self._edp) > 1:
            self._shard(config)

    def _shard(self, config: Config) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

        mesh = DeviceMesh.from_group(self._topology.group("edp"), self._device.type, mesh_dim_names=("efsdp",))
        # As in the library: by expert, or within the experts where there are more ranks than experts.
        dim = 1 if len(self._edp) * len(self._topology.ranks("ep")) > config.experts else 0
        fully_shard(
            self._module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=config.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            reshard_after_forward=False,  # as the library has it under pipeline schedules
            shard_placement_fn=lambda _: Shard(dim),
        )
        disable_fsdp_gradient_division(self._module)
        module: Any = self._module
        if self._device.type == "cpu":  # gloo has no premultiplied sum, which FSDP2 takes even for a factor of one
            module.set_force_sum_reduction_for_comms(True)
        module.set_requires_gradient_sync(False)
        module.set_reshard_after_backward(False)
        module.set_is_last_backward(False)

    @property
    def resolved(self) -> Mapping[str, str]:
        weight = next(self._module.parameters())
        return {
            "experts": type(self._module).__qualname__,
            "parameters": str(weight.dtype),
            "shards": str(weight.placements) if isinstance(weight, DTensor) else "none",
        }

    def __call__(self, delivery: Delivery) -> Tensor:
        assert delivery.counts_N is not None  # the dispatchers count
        out_RD: Tensor = self._module(delivery.rows_RD, delivery.counts_N.to(delivery.rows_RD.device))
        return out_RD

    def named(self, read: Read) -> Iterator[Named]:
        return expert_windows(self._module, self._first, self._topology, read)

    @property
    def module(self) -> nn.Module:
        return self._module

    def reshard(self) -> None:
        """Free the gathered parameters, which FSDP2 is configured to keep."""
        if len(self._edp) > 1:
            module: Any = self._module
            module.reshard()

    def reduce(self) -> None:
        if len(self._edp) == 1:
            return
        from torch.distributed.pipelining import PipelineStage

        pp = self._topology.ranks("pp")
        stage: Any = PipelineStage(
            self._module, pp.index(self._topology.rank), len(pp), self._device, group=self._topology.group("pp")
        )
        stage.perform_reduce_grad(1)


# ---- router --------------------------------------------------------------------------------------------------
