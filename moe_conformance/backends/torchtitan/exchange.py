"""The library's token dispatchers for a given routing.

T tokens, K slots, E experts, N experts of this rank, R rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moe_conformance.contract import Claims, Config, Delivery, Routing, Topology, Unsupported

INSTALL = "pip install --no-deps torchtitan spmd_types triton tyro docstring_parser torchao"
DISPATCHERS = {
    "local": "LocalTokenDispatcher",
    "alltoall": "AllToAllTokenDispatcher",
    "torchao": "TorchAOTokenDispatcher",
}


def placement(topology: Topology, config: Config) -> tuple[int, int]:
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


def dispatcher_config(config: Config, topology: Topology) -> Any:
    """Return the config of the dispatcher that the variant names, or refuse what it does not have."""
    if config.variant not in DISPATCHERS:
        raise Unsupported(f"variant {config.variant!r} is not one of {', '.join(DISPATCHERS)}")
    ep = len(topology.ranks("ep"))
    if config.variant == "local" and ep > 1:
        raise Unsupported(f"the local dispatcher has no expert parallelism: ep = {ep}")
    if config.variant == "torchao" and find_spec("torchao") is None:
        raise Unsupported(f"the torchao variant needs torchao: {INSTALL}")
    from torchtitan.models.common import token_dispatcher

    # 16: to what the library itself pads for its float8 experts.
    padding = {"pad_multiple": 16} if config.variant == "torchao" else {}
    chosen = getattr(token_dispatcher, DISPATCHERS[config.variant])
    return chosen.Config(num_experts=config.experts, top_k=config.top_k, **padding)


def dispatcher(config: Config, topology: Topology, device: torch.device) -> Any:
    """Return a dispatcher wired to this rank's ep group."""
    built = dispatcher_config(config, topology).build()
    built.wire_meshes(ep_mesh=ep_mesh(topology, device))
    return built


def ep_mesh(topology: Topology, device: torch.device) -> DeviceMesh | None:
    """Return the mesh of this rank's ep group, None for a group of one rank."""
    ep = topology.group("ep")
    return DeviceMesh.from_group(ep, device.type, mesh_dim_names=("ep",)) if ep.size() > 1 else None


class Exchange:
    """A dispatcher; all of its state goes into the handle."""

    def __init__(self, dispatcher: Any, local_experts: range) -> None:
        self._dispatcher, self._experts = dispatcher, local_experts

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts."""
        return tuple(self._experts)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The dispatcher, and over how many ranks it sends."""
        mesh = getattr(self._dispatcher, "ep_mesh", None)
        return {
            "dispatcher": type(self._dispatcher).__qualname__,
            "path": "local" if mesh is None else f"all_to_all over {mesh.size()} ranks",
        }

    @property
    def claims(self) -> Claims:
        """To what multiple rows are padded; products are computed in float32.

        Sums are scatter-adds in the dtype of the rows: torch rounds once on a CPU, and after each addition on a GPU.
        """
        return Claims(multiple=getattr(self._dispatcher, "pad_multiple", 1), combine_weights="float32")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Send rows to their experts."""
        x_TD = x.reshape(-1, x.shape[-1])
        counts_E = torch.bincount(routing.ids_TK.reshape(-1), minlength=routing.experts)
        rows_RD, counts_N, metadata = self._dispatcher.dispatch(x_TD, routing.weights_TK, routing.ids_TK, counts_E)
        return Delivery.grouped(rows_RD, counts_N), (metadata, x_TD, x.shape)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return the weighted sums."""
        metadata, x_TD, shape = handle
        y_TD: Tensor = self._dispatcher.combine(rows, metadata, x_TD)
        return y_TD.reshape(shape)
