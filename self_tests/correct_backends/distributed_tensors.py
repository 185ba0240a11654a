"""Parameters that are DTensors on a device mesh, and an exchange of functional collectives."""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from moe_conformance.contract import Config, Delivery, Named, Read, Routing, Topology
from self_tests.correct_backends.small_parts import (
    AdaptedExperts,
    AdaptedGate,
    Gate,
    SmallBackend,
    SmallSession,
    SwiGLU,
    share,
    weighted_sum,
)


def distribute(module: nn.Module, mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    """Replace the parameters of a module, which are this rank's parts, by DTensors."""
    for name, parameter in list(module.named_parameters()):
        placed = DTensor.from_local(parameter.detach(), mesh, [placement], run_check=False)
        setattr(module, name, nn.Parameter(placed))


def _part(parameter: Tensor) -> Tensor:
    """Return the local tensor, differentiable."""
    assert isinstance(parameter, DTensor)
    part: Tensor = parameter.to_local()
    return part


def local(parameter: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, with the local tensor of its gradient."""
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        part: Tensor = parameter.to_local()
        part.grad = None if parameter.grad is None else parameter.grad.to_local()  # type: ignore[attr-defined]
    return part


class MeshGate(Gate):
    """A gate whose weight is a replicated DTensor."""

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = F.linear(x_TD.to(wide), _part(self.weight).to(wide))
        weights_TK, ids_TK = logits_TE.softmax(1).topk(self.top_k, dim=1)
        return ids_TK, self.weighed(weights_TK), logits_TE


class MeshExperts(SwiGLU):
    """Experts of which every rank of the mesh holds a shard."""

    def one(self, n: int, rows: Tensor) -> Tensor:
        w1, w3, w2 = (_part(each)[n] for each in (self.w1, self.w3, self.w2))
        return F.linear(F.silu(F.linear(rows, w1)) * F.linear(rows, w3), w2)


class MeshExchange:
    """all_to_all_single with uneven splits, as a functional collective with its own backward."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        self.group, self.experts = mesh.get_group(), config.experts
        self.local_experts = tuple(share(config.experts, self.group))
        self.resolved = {"exchange": f"functional collectives over {mesh}"}

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        ids_P, W = routing.ids_TK.flatten(), self.group.size()
        slots_S = ids_P.argsort(stable=True)[int((ids_P < 0).sum()) :]
        sent_WN = ids_P[slots_S].bincount(minlength=self.experts).view(W, -1)
        received_E = funcol.all_to_all_single(sent_WN.flatten(), None, None, self.group)
        received_WN = funcol.wait_tensor(received_E).view(W, -1)
        sent, received = sent_WN.sum(1).tolist(), received_WN.sum(1).tolist()
        rows_SD = x.reshape(-1, x.shape[-1])[slots_S // routing.ids_TK.shape[1]]
        rows_RD = funcol.all_to_all_single_autograd(rows_SD, received, sent, self.group)
        order_R = torch.arange(received_WN.shape[1]).repeat(W).repeat_interleave(received_WN.flatten()).argsort()
        handle = (x.shape, routing.weights_TK, slots_S, order_R, received, sent)
        return Delivery.grouped(rows_RD[order_R], received_WN.sum(0)), handle

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        shape, weights_TK, slots_S, order_R, received, sent = handle
        back_RD = rows[order_R.argsort()].contiguous()
        out_SD = funcol.all_to_all_single_autograd(back_RD, sent, received, self.group)
        return weighted_sum(out_SD, slots_S, weights_TK).view(shape)


class GateOnMesh(AdaptedGate):
    """The gate, with windows on local tensors."""

    def named(self, read: Read) -> Iterator[Named]:
        return super().named(lambda parameter: read(local(parameter)))


class ExpertsOnMesh(AdaptedExperts):
    """The experts, with windows on local tensors."""

    def named(self, read: Read) -> Iterator[Named]:
        return super().named(lambda parameter: read(local(parameter)))


class MeshSession(SmallSession):
    """One topology on one rank, as device meshes."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.mesh = DeviceMesh.from_group(self.ep, "cpu", mesh_dim_names=("ep",))

    def build_exchange(self, config: Config) -> MeshExchange:
        return MeshExchange(config, self.mesh)

    def build_experts(self, config: Config) -> AdaptedExperts:
        experts = MeshExperts(share(config.experts, self.ep), config)
        distribute(experts, self.mesh, Shard(0))
        return ExpertsOnMesh(experts)

    def build_gate(self, config: Config) -> AdaptedGate:
        gate = MeshGate(config)
        distribute(gate, self.mesh, Replicate())
        return GateOnMesh(gate)

    def finish_gate(self, gate: nn.Module) -> None:
        self._sum(gate, "tp", "dp_cp")

    def finish_experts(self, experts: nn.Module) -> None:
        self._sum(experts, "edp")

    @torch.no_grad()  # also where the backward keeps a graph of itself
    def _sum(self, module: nn.Module, *groups: str) -> None:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            part = parameter.grad.to_local()  # type: ignore[attr-defined]
            for group in groups:
                part.copy_(funcol.all_reduce(part, "sum", self.topology.group(group)))


class Mesh(SmallBackend):
    """What `--backend self_tests.correct_backends.distributed_tensors:Mesh` names."""

    name, session = "distributed-tensors", MeshSession
    judged: Mapping[int, int] = {1: 45, 2: 60, 4: 60}
