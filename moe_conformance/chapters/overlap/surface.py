"""The overlap of exchange and computation: `Config.overlap`, surfaces, claims. Import them from `contract`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Parametrised, Resolved
from moe_conformance.contract.values import check

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class Overlap:
    """`Config.overlap`: what is computed while tokens are exchanged. An exchange reads `chunks`, a step all others."""

    chunks: int = 1  # parts of the tokens, of which one is exchanged while experts run on another
    layers: int = 1  # MoE layers of the model that a step runs
    deferred_weights: bool = False  # delayed wgrad: weight gradients of experts follow the gradients of their inputs
    recompute_experts: bool = False  # activation recomputation of the routed experts, in the backward

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "overlap.", chunks=1, layers=1)


class OverlappedLayer(Parametrised, Protocol):
    """A layer of an `OverlappedStep`, which runs in the schedule of the step and can also be called alone.

    `named` yields what that of a `contract.Layer` does, and the further parameters that the workload has for layers.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return y in the shape of x; its backward leaves no weight gradient for later."""


class OverlappedStep(Resolved, Protocol):
    """A training step of several MoE layers that overlaps exchanges with computation (`Config.overlap`).

    The layers follow each other: y = f_L(... f_1(x)). While tokens of one microbatch are dispatched or combined,
    something else is computed that does not need them. It claims `overlap` "no" if nothing is in flight. If gradients
    of the step follow another convention than the session's, an attribute `loss_convention` says which.
    """

    @property
    def layers(self) -> Sequence[OverlappedLayer]:
        """The layers, `Config.overlap.layers` of them, with the parameters that the step trains."""

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return y of every microbatch after all forwards and backwards; collective, with as many on all ranks.

        Each x is a leaf (T, D) that asks for a gradient; upstream is dL/dy. Gradients are added to what x and the
        parameters have, those of deferred weights too, and none is left for later. Reductions over replicas follow in
        `Session.finish_gradients` of the layers.
        """


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def overlapped_step(self, config: Config) -> OverlappedStep:
        """Build the layers of a model, and the schedule of a step that overlaps their exchanges; collective."""
        raise Unsupported("this backend offers no step that overlaps exchange and computation")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # yes: a step that is built with overlap has exchanges in flight while it computes (OVLP-12); no: it has none.
    overlap: Literal["yes", "no"] = "yes"
    # yes: a layer of an overlapped step returns x plus the output of its MoE layer, as a transformer layer does.
    residual: Literal["yes", "no"] = "no"


SECTIONS = {"overlap": Overlap}
