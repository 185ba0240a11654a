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
from moe_conformance.contract import Claims, Config, Delivery, ExpertFn, Routing


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
        self._gate, self._experts = _GivenRouting(placement.topology.sizes["tp"]), _GivenExperts()
        self._layer = library.sharded_moe.MOELayer(
            self._gate, self._experts, placement.name, placement.ep, len(self.local_experts), use_tutel=False
        )
        self._layer._set_ep_group(placement.group)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, the size of its group, and what is left out."""
        return {
            "layer": type(self._layer).__qualname__,
            "ep ranks": str(self._layer.ep_size),
            "tutel": str(self._layer.use_tutel),
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
