"""The library's GroupedExperts, whose products are replaced by the given experts.

T tokens of this rank, R tokens of all ranks of ep, P pairs of this rank's experts, K slots, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.automodel.placement import Placement, backend_config, moe_config
from moe_conformance.contract import Claims, Config, Delivery, ExpertFn, Routing


class Exchange:
    """What is left of GroupedExperts: it gathers tokens, weights and ids, and adds up outputs over ranks."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build all E experts, and let the library keep this rank's."""
        from nemo_automodel.components.moe.experts import GroupedExperts
        from nemo_automodel.components.moe.parallelizer import ExpertParallel
        from torch.distributed.tensor.parallel import parallelize_module

        module: Any = GroupedExperts(moe_config(config), backend_config(config)).to(placement.device)
        mesh = placement.moe_mesh
        if mesh is not None:
            parallelize_module(module, mesh["ep"], ExpertParallel())
        module._forward_loop, module._forward_grouped_mm = self._in_loop, self._in_grouped_mm
        self._module, self._placement = module, placement
        self._expert: ExpertFn

    def _in_loop(self, x_RD: Tensor, weights_RK: Tensor, ids_RK: Tensor, mask_R: Tensor, *_: Any) -> Tensor:
        return self._in_grouped_mm(x_RD, mask_R, weights_RK, ids_RK)

    def _in_grouped_mm(self, x_RD: Tensor, mask_R: Tensor, weights_RK: Tensor, ids_RK: Tensor, *_: Any) -> Tensor:
        """Do as the library's grouped products, which sort the pairs of this rank's experts and add up in float32."""
        from nemo_automodel.components.moe.experts import _permute_tokens_for_grouped_mm

        held, first = self._placement.held, self._placement.first
        tokens_P, weights_P, counts_N, _ = _permute_tokens_for_grouped_mm(ids_RK, weights_RK, mask_R, held, first)
        out_PD = self._expert(Delivery.grouped(x_RD[tokens_P], counts_N, weights_P))
        y_RD = torch.zeros(x_RD.shape, dtype=torch.float32, device=x_RD.device)
        return y_RD.scatter_add_(0, tokens_P[:, None].expand_as(out_PD), out_PD.float())

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
