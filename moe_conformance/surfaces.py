"""Surfaces that a session may offer beside those of `contract`: all of them optional.

They are under the rules of `contract`, with its letters; a surface that is not offered is reported as "not offered".
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moe_conformance.contract import Parametrised, Resolved


class Layer(Parametrised, Resolved, Protocol):
    """A whole layer: router, dispatch, experts, combine, and the shared experts beside them.

    y_t = sum_k w_tk f_{e_tk}(x_t) + a_t sum_j h_j(x_t): every shared expert is a SwiGLU of its own width
    (`Config.shared_ffn`), a_t = sigmoid(<v, x_t>) with `Config.shared_gate` and 1 without.

    `named` yields the windows of the router and of the experts, and those of the shared experts: "shared_gate" and
    "shared_up" (F, D) and "shared_down" (D, F) with the number j of the shared expert in place of an expert's id, and
    "shared_score" (1, D), which is v. What tp splits is told by `Named.shard`, be it inside a fused parameter or not.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return y in the shape (*lead, D) of x, differentiable in x and in all parameters."""
