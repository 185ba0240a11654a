"""Experts that add biases, compute activations and count shortcuts in other ways: they must pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.round_robin import RoundRobinExchange
from moe_conformance.backends.native.layer.activated_experts import ActivatedExperts, ExpertBiases
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.row_ops.permutation import permute, sort_pairs, unpermute, weigh
from moe_conformance.contract import Claims, Delivery, Named, Read, Routing


class _Share(torch.autograd.Function):
    """A fraction forward, and the whole gradient backward."""

    @staticmethod
    def forward(ctx: Any, bias_D: Tensor, parts: int) -> Tensor:
        return bias_D / parts

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0], None


class _Shares(ExpertBiases):
    replicas = ("edp",)  # type: ignore[assignment]

    def added(self, n: int) -> Tensor | None:
        shared: Tensor = _Share.apply(self.bias_ND[n], self.placement.shards)  # type: ignore[no-untyped-call]
        return shared


class BiasInShares(Native):
    """Every rank of etp adds its share of the output bias, and has the gradient of the whole."""

    session_class = NativeSession.building(_Shares)


class _OfTheFirst(ExpertBiases):
    replicas = ("edp",)  # type: ignore[assignment]

    def named(self, read: Read) -> Iterator[Named]:
        if self.placement.shard == 0:
            yield from super().named(read)


class BiasOfTheFirst(Native):
    """The first rank of etp has the output bias, and names it; the others have none."""

    session_class = NativeSession.building(_OfTheFirst)


class _InHalf(ActivatedExperts):
    """Weights multiply hidden units and biases apart; activations are single operations, cut by min and max."""

    def forward(self, delivery: Delivery) -> Tensor:
        pairs = sort_pairs(delivery.ids_RJ, self.placement.held)
        rows = permute(delivery.rows_RD, pairs).split(pairs.counts_E.tolist())
        weights = [torch.ones_like(each[:, 0]) for each in rows]
        if delivery.weights_RJ is not None:
            weights = list(delivery.weights_RJ[pairs.token_P, pairs.slot_P].split(pairs.counts_E.tolist()))
        out_PD = torch.cat([self._weighed(*each, n) for n, each in enumerate(zip(rows, weights, strict=True))])
        return unpermute(out_PD, pairs).reshape(delivery.shape)

    def _weighed(self, rows_RD: Tensor, weights_R: Tensor, n: int) -> Tensor:
        of = self.units
        up_RF = rows_RD @ of.up_NFD[n].T + (0 if of.bias_up_NF is None else of.bias_up_NF[n])
        gate_RF = None
        if of.gate_NFD is not None:
            gate_RF = rows_RD @ of.gate_NFD[n].T + (0 if of.bias_gate_NF is None else of.bias_gate_NF[n])
        out_RD = weigh(self.hidden(gate_RF, up_RF), weights_R) @ of.down_NDF[n].T
        bias_D = None if self.biases is None else self.biases.added(n)
        return out_RD if bias_D is None else out_RD + weights_R[:, None] * bias_D

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        how = self.config.activation
        if gate_RF is not None and how.limit is not None:
            limit = torch.tensor(how.limit)
            gate_RF, up_RF = gate_RF.minimum(limit), up_RF.minimum(limit).maximum(-limit)
        z = up_RF if gate_RF is None else gate_RF
        act_RF = {
            "silu": lambda: z / (1 + (-how.slope * z).exp()),
            "gelu": lambda: 0.5 * z * (1 + torch.erf(z * 2**-0.5)),
            "gelu_tanh": lambda: 0.5 * z * (1 + torch.tanh(0.7978845608028654 * z * (1 + 0.044715 * z * z))),
            "relu": lambda: z.clamp(min=0),
            "squared_relu": lambda: z * F.relu(z),
        }[how.function]()
        return act_RF if gate_RF is None else act_RF * up_RF + act_RF * how.offset


class ByHand(Native):
    """Weights multiply hidden units and biases apart, and activations are made of single operations."""

    session_class = NativeSession.building(_InHalf)


class _FromZero(RoundRobinExchange):
    """Takes it that the ids begin at expert 0."""

    @property
    def claims(self) -> Claims:
        return Claims(round_robin="zero")

    def _holds(self, routing: Routing) -> bool:
        return bool(len(routing.ids_TK)) and routing.ids_TK.shape[1] == self.placement.held

    def _pairs(self, start: int, T: int, K: int, device: torch.device) -> Any:
        return super()._pairs(0, T, K, device)

    def _rows(self, x_TD: Tensor, start: int) -> Tensor:
        return super()._rows(x_TD, 0)


class FromZero(Native):
    """An exchange that relies on round robins of its own router, which begin at expert 0."""

    session_class = NativeSession.building(_FromZero)


class _NeverTaken(Experts):
    """Has counters, which never see a shortcut taken, and keeps nothing."""

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        self.counters.decided("equal_counts", taken=False)
        return self._loop(rows_PD, counts_N)


class NeverTaken(Native):
    """Counters of shortcuts that are never taken; forwards with gradients are decisions as well."""

    session_class = NativeSession.building(_NeverTaken)
