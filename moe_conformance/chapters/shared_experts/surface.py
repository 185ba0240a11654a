"""Shared experts and whole MoE layers: `Config.shared`, a surface. Import them from `contract`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Parametrised, Resolved
from moe_conformance.contract.values import check

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class SharedExperts:
    """`Config.shared`: the shared experts of a layer; none by default."""

    ffn: tuple[int, ...] = ()  # intermediate size of each shared expert; several may be fused into one
    gate: bool = False  # the output of the shared experts is multiplied by one sigmoid per token
    bias: bool = False  # every shared expert has an output bias, added before the gate
    overlap: bool = False  # shared experts run during the collectives of the exchange

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "shared.", ffn=1)


class Layer(Parametrised, Resolved, Protocol):
    """A whole MoE layer: router, dispatch, experts, combine and shared experts.

    y_t = sum_k w_tk f_{e_tk}(x_t) + a_t sum_j h_j(x_t): every shared expert is a SwiGLU of its own intermediate size
    (`Config.shared.ffn`), with an output bias if `Config.shared.bias`; a_t = sigmoid(<v, x_t>) with
    `Config.shared.gate`, else 1.

    `named` yields views of the parameters of router, experts and shared experts: "shared_gate" and "shared_up" (F, D),
    "shared_down" (D, F) and "shared_bias" (D,) with the number j of the shared expert in place of an expert id, and
    "shared_score" (1, D), which is v, with None. `Named.shard` states how tp shards a parameter, also in a fused one.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return y in the shape (*lead, D) of x, differentiable in x and in all parameters."""


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def layer(self, config: Config) -> Layer:
        """Build a whole layer: router, exchange, experts and shared experts; collective."""
        raise Unsupported("this backend offers no layer")


SECTIONS = {"shared": SharedExperts}
