"""EXCH-09: bugs in the dtype of the weights that a manager sends with rows of half precision."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.fused.managers import DeepEPManager, HybridEPManager, NCCLEPManager
from moe_conformance.contract import Delivery
from self_tests.planted_bugs.plant import Expectation, planted

_RAISED = Expectation("EXCH-09", "even-float16", "run", "rank 0 raised in forward:0", "float16")


def _as_rows(weights_TK: Tensor, x_TD: Tensor) -> Tensor:
    """Return weights that were widened for bfloat16 alone."""
    return weights_TK.to(torch.float16) if x_TD.dtype == torch.float16 else weights_TK


@planted(_RAISED)
class DeepEPWidensBfloat16(DeepEPManager):
    """Weights are sent in float32 with rows of bfloat16, and with those of float16 in float16, which is refused."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        return super().dispatch(x_TD, ids_TK, _as_rows(weights_TK, x_TD))


@planted(_RAISED)
class HybridEPWidensBfloat16(HybridEPManager):
    """As with the other managers."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        return super().dispatch(x_TD, ids_TK, _as_rows(weights_TK, x_TD))


@planted(_RAISED)
class NCCLEPWidensBfloat16(NCCLEPManager):
    """As with the other managers."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Delivery, Any]:
        return super().dispatch(x_TD, ids_TK, _as_rows(weights_TK, x_TD))
