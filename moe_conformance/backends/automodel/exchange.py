"""The library's GroupedExperts, in which the given experts take the place of the two products.

T tokens of this rank, R tokens of all ranks of ep, P pairs of this rank's experts, K slots, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_conformance.backends.automodel.placement import Placement, backend_config, moe_config
from moe_conformance.contract import Claims, Config, Delivery, ExpertFn, Routing

_PRODUCTS = "_torch_mm_experts_fwd"  # of rows that are sorted by expert


class Exchange:
    """GroupedExperts without products: it gathers tokens, sorts pairs, and adds up outputs over slots and ranks.

    The products of the form "loop" stand in the same function as all else; the exchange of both variants is that of the
    form "grouped", whose products are a function of their own.
    """

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build all E experts, and let the library keep this rank's."""
        from nemo_automodel.components.moe import experts
        from nemo_automodel.components.moe.parallelizer import ExpertParallel
        from torch.distributed.tensor.parallel import parallelize_module

        module: Any = experts.GroupedExperts(moe_config(config), backend_config(config)).to(placement.device)
        mesh = placement.moe_mesh
        if mesh is not None:
            parallelize_module(module, mesh["ep"], ExpertParallel())
        module.use_torch_mm = True
        module.expert_bias = False  # else products and biases stand in the same function
        self._grouped, module._forward_grouped_mm = module._forward_grouped_mm, self._in_grouped_mm
        self._module, self._placement, self._library = module, placement, experts
        self._library_products = getattr(experts, _PRODUCTS)
        self._expert: ExpertFn

    def _in_grouped_mm(
        self, x_RD: Tensor, mask_R: Tensor, weights_RK: Tensor, ids_RK: Tensor, *of_experts: Any
    ) -> Tensor:
        """Call the library's function, its products replaced.

        Where this rank's experts have no pair, the library multiplies zeros by its own weights, and the given experts
        would not be called: they are called with no row, and their output is added to nothing.
        """
        first = self._placement.first
        if bool(((ids_RK >= first) & (ids_RK < first + self._placement.held)).any()):
            with patch.object(self._library, _PRODUCTS, self._products):
                y_RD: Tensor = self._grouped(x_RD, mask_R, weights_RK, ids_RK, *of_experts)
            return y_RD
        counts_N = torch.zeros(self._placement.held, dtype=torch.int64, device=x_RD.device)
        out_PD = self._expert(Delivery.grouped(x_RD[:0], counts_N, weights_RK[:0, 0]))
        return torch.zeros(x_RD.shape, dtype=torch.float32, device=x_RD.device) + out_PD.float().sum(dim=0)

    def _products(
        self, x_PD: Tensor, gate_up: Any, down: Any, counts_N: Tensor, weights_P1: Tensor, *_: Any, **__: Any
    ) -> Any:
        with patch.object(self._library, _PRODUCTS, self._library_products):  # the given experts may be the library's
            return self._expert(Delivery.grouped(x_PD, counts_N, weights_P1.squeeze(-1)))

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts: one contiguous range per ep rank."""
        return tuple(range(self._placement.first, self._placement.first + self._placement.held))

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, and over how many ranks it gathers."""
        return {"experts": type(self._module).__qualname__, "ep ranks": str(self._placement.ep)}

    @property
    def claims(self) -> Claims:
        """All tokens go to all ranks, and weights are the experts' to apply."""
        return Claims(wire="all", weights_at="expert")

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Run the module; no token is padding."""
        self._expert = expert
        x_TD = x.reshape(-1, x.shape[-1])
        mask_T = torch.ones(len(x_TD), dtype=torch.bool, device=x.device)
        y_TD: Tensor = self._module(x_TD, mask_T, routing.weights_TK, routing.ids_TK)
        return y_TD.reshape(x.shape)
