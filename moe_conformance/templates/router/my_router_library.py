"""A library as small as can be, for my_adapter.py: a top-k router. Letters as in moe_conformance/contract."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__version__ = "1.0"

SCORES = ("softmax", "sigmoid")


class Router(nn.Module):
    """Scores of a linear layer, the K best of each token, and their weights."""

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        score: str,
        normalise: bool,
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        """Make the weight (E, D); ValueError for an unknown score, or where a token cannot select so many experts."""
        super().__init__()
        if score not in SCORES:
            raise ValueError(f"no score {score!r}; there are {' and '.join(SCORES)}")
        if not 0 < top_k <= experts:
            raise ValueError(f"top_k = {top_k} of {experts} experts")
        self.top_k, self.score, self.normalise, self.scale = top_k, score, normalise, scale
        self.wide = torch.promote_types(dtype, torch.float32)  # in which logits and scores are computed
        self.weight = nn.Parameter(torch.randn(experts, hidden, dtype=dtype) / hidden**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids (T, K), weights (T, K) and logits (T, E) of x (..., D)."""
        logits_TE = x.reshape(-1, x.shape[-1]).to(self.wide) @ self.weight.to(self.wide).t()
        scores_TE = logits_TE.softmax(1) if self.score == "softmax" else logits_TE.sigmoid()
        weights_TK, ids_TK = scores_TE.topk(self.top_k, dim=1)
        if self.normalise:
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)  # sigmoid: all may be 0
        return ids_TK, weights_TK * self.scale, logits_TE
