"""The library's MOELayer around the given experts, for a given routing.

T tokens, K slots, E experts, N experts of this rank, D hidden, C places of an expert, W ranks of ep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_conformance.backends.deepspeed import library
from moe_conformance.backends.deepspeed.placement import Placement
from moe_conformance.contract import Claims, Config, Delivery, ExpertFn, Routing, Unsupported


class _GivenRouting(nn.Module):
    """Replaces the gate, and returns the routing of the call in the form of the library's gates.

    A pair's place among those of its expert, and their number C, are a gate's to decide: as in the library's gates
    nothing is dropped, and C is the largest load of an expert on any rank, a multiple of tp.
    """

    routing: Routing

    def __init__(self, tp: int) -> None:
        super().__init__()
        self._tp, self._group = tp, None

    def _set_ep_group(self, group: Any) -> None:
        self._group = group

    def forward(self, x_TD: Tensor, used_T: None, sparse: bool, tutel: bool) -> tuple[Any, ...]:
        ids_KT, E = self.routing.ids_TK.T.contiguous(), self.routing.experts
        chosen_PE = nn.functional.one_hot(ids_KT.flatten().clamp_min(0), E) * (ids_KT.flatten() >= 0)[:, None]
        load_E = chosen_PE.sum(0)
        places_KT = ((chosen_PE.cumsum(0) - 1) * chosen_PE).sum(1).reshape(ids_KT.shape)
        C = load_E.max()
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(C, dist.ReduceOp.MAX, group=self._group)
        C = -(-C // self._tp) * self._tp
        weights_KT = torch.where(ids_KT >= 0, self.routing.weights_TK.T, 0.0)  # the library's gates write 0 there
        return x_TD.new_zeros(()), C, E, ids_KT, places_KT, weights_KT, load_E


class _LosslessGate(_GivenRouting):
    """Replaces the layer's gate by one that drops no tokens, whose logits lead to the routing of the call.

    Places and C are that gate's. Its weights are those of the logits, and are replaced by the routing's.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(tp=1)
        E = config.experts
        self._made = library.sharded_moe.TopKGate(
            E, E, config.top_k, min_capacity=0, drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False
        )
        self._made.wg.weight.requires_grad_(False).copy_(torch.eye(E))  # logits are what it is called with

    def _set_ep_group(self, group: Any) -> None:
        self._made._set_ep_group(group)

    def forward(self, x_TD: Tensor, used_T: None, sparse: bool, tutel: bool) -> tuple[Any, ...]:
        ids_TK, E = self.routing.ids_TK, self.routing.experts
        if bool((ids_TK < 0).any()):
            raise Unsupported("a gate that drops no tokens leaves no slot empty")
        falling_TK = -torch.arange(ids_TK.shape[1], dtype=torch.float32).expand(ids_TK.shape)
        logits_TE = torch.full((len(ids_TK), E), -1e4).scatter(1, ids_TK, falling_TK)
        loss, C, E, ids_KT, places_KT, _, load_E = self._made(logits_TE, used_T, sparse, tutel)
        return loss, C, E, ids_KT, places_KT, self.routing.weights_TK.T, load_E


class _GivenExperts(nn.Module):
    """Replaces the experts: receives (W, N, C, D), and computes the function given for the call."""

    expert: ExpertFn

    def forward(self, rows_WNCD: Tensor) -> Tensor:
        W, N, C, D = rows_WNCD.shape
        rows_NRD = rows_WNCD.transpose(0, 1).reshape(N, W * C, D)
        out: Tensor = self.expert(Delivery.batched(rows_NRD))
        return out.reshape(N, W, C, D).transpose(0, 1)


class Exchange:
    """A MOELayer; tensor ranks hold the same tokens."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build the layer without the library's gate and experts."""
        self.local_experts = tuple(placement.held(config.experts))
        tp = placement.topology.sizes["tp"]
        self._gate = _LosslessGate(config) if config.capacity.padded else _GivenRouting(tp)
        self._experts = _GivenExperts()
        self._layer = library.sharded_moe.MOELayer(
            self._gate, self._experts, placement.name, placement.ep, len(self.local_experts), use_tutel=False
        )
        self._layer._set_ep_group(placement.group)
        self._lossless = config.capacity.padded

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, the size of its group, and what is left out."""
        return {
            "layer": type(self._layer).__qualname__,
            "ep ranks": str(self._layer.ep_size),
            "tutel": str(self._layer.use_tutel),
            "gate": "TopKGate without drops, with given weights" if self._lossless else "replaced by a given routing",
            "shims": library.SHIMS,
        }

    @property
    def claims(self) -> Claims:
        """Every rank sends C rows to every expert."""
        return Claims(wire="capacity", handed="static")

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Run the layer; it takes x of any leading dimensions, and no mask of used tokens."""
        self._gate.routing, self._experts.expert = routing, expert
        y: Tensor = self._layer(x, None)
        return y
