"""Routers whose balance bias follows another convention, and which say so where they have to: they must pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.router.balancing import BalancingRouters
from moe_conformance.backends.native.router.quantile_balancing import QuantileRouters
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Claims, Config, Routed


class _Centred(BalancingRouters):
    def change(self, n_E: Tensor) -> Tensor:
        change_E = super().change(n_E)
        return change_E - change_E.mean()

    def loads(self) -> None:
        return None


class Centred(Native):
    """Changes are shifted to a mean of zero, as in torchtitan, and counters cannot be read."""

    session_class = NativeSession.building(_Centred)


class _QuantilesOfParts(QuantileRouters):
    @property
    def claims(self) -> Claims:
        return Claims(balance_quantiles="parts")

    @torch.no_grad()
    def update(self) -> None:
        for number, parts in enumerate(self.scores):
            bias_E = self.routers[number].balance_bias
            assert isinstance(bias_E, Tensor)
            found = [self.balanced(part_VE, bias_E) for part_VE in parts]
            total_E, parts_of_all = torch.stack([torch.zeros_like(bias_E), *found]).sum(0), torch.tensor(len(found))
            for summed in (total_E, parts_of_all):
                dist.all_reduce(summed, group=self.topology.group("dp_cp"))
            if parts_of_all:
                bias_E.copy_(total_E / parts_of_all)
        self.begin()


class QuantilesOfParts(Native):
    """The bias is the mean of the quantiles of microbatches and data parallel groups, as in Megatron-Core; tp = 1."""

    session_class = NativeSession.building(_QuantilesOfParts)


class _AfterDrops(BalancingRouters):
    @property
    def claims(self) -> Claims:
        return Claims(balance_loads="kept")

    def load(self, routed: Routed, padding_mask_T: Tensor | None) -> Tensor:
        ids_TK = routed.routing.ids_TK
        return torch.bincount(ids_TK[ids_TK >= 0], minlength=self.config.experts)


class AfterDrops(Native):
    """Slots that were dropped do not count, as in Megatron-Core."""

    session_class = NativeSession.building(_AfterDrops)


class _ForcedToo(BalancingRouters):
    @property
    def claims(self) -> Claims:
        return Claims(forced_loads="counted")

    def counts(self) -> bool:
        return self.training and torch.is_grad_enabled()


class ForcedToo(Native):
    """Forced loads count, as in Megatron-Core and torchtitan."""

    session_class = NativeSession.building(_ForcedToo)


class _ReducedAtOnce(BalancingRouters):
    @property
    def claims(self) -> Claims:
        return Claims(balance_counters="of_all")

    def load(self, routed: Routed, padding_mask_T: Tensor | None) -> Tensor:
        load_E = super().load(routed, padding_mask_T)
        for name in ("tp", "dp_cp"):
            dist.all_reduce(load_E, group=self.topology.group(name))
        return load_E

    def over_ranks(self, loads_LE: Tensor) -> Tensor:
        return loads_LE


class ReducedAtOnce(Native):
    """Loads are summed over ranks in every forward."""

    session_class = NativeSession.building(_ReducedAtOnce)


class _Frozen(Router):
    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        bias_E = self.balance_bias
        if bias_E is not None:
            del self.balance_bias
            self.balance_bias = nn.Parameter(bias_E.double(), requires_grad=False)


class _Copying(BalancingRouters):
    def state_dict(self, *arguments: Any, **how: Any) -> Mapping[str, Tensor]:  # type: ignore[override]
        return {"biases": torch.stack([each.balance_bias.detach() for each in self.routers])}  # type: ignore[operator]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # type: ignore[override]
        for router, bias_E in zip(self.routers, state["biases"], strict=True):
            router.balance_bias.copy_(bias_E)  # type: ignore[operator]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (each for each in super().parameters(recurse) if each.requires_grad)


class Frozen(Native):
    """The bias is a parameter of float64 that asks for no gradient; a checkpoint has one copy of all layers."""

    session_class = NativeSession.building(_Frozen, _Copying)


class _SaysAfterDrops(BalancingRouters):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, balance_loads="kept", balance_counters="of_all", forced_loads="counted")


class SaysAfterDrops(Native):
    """It lies: it claims loads after drops, those of forced routing too, and it counts otherwise."""

    session_class = NativeSession.building(_SaysAfterDrops)
