"""The surface for overload factors: a meter of loads. Import it from `contract`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Placed

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class MeteredPass:
    """One pass of a step that is metered: a forward, a backward, or the end of an abandoned step.

    "alone" is a training forward without a gradient; "abandon" gives up the passes before it. A backward is that of the
    forward of its layer and microbatch. Padding tokens have empty slots, as dropped ones are.
    """

    kind: Literal["forward", "backward", "alone", "evaluation", "abandon"]
    layer: int | None = None  # global number, from 0
    microbatch: int = 0
    ids_TK: Tensor | None = None  # of a forward: what dispatch receives
    padding_T: Tensor | None = None  # of a forward: bool, True = padding
    x: Tensor | None = None  # of a forward: (*lead, D), prod(lead) == T
    weights_TK: Tensor | None = None  # of a forward; they and x ask for gradients where a backward follows
    upstream: Tensor | None = None  # of a forward that a backward follows: the gradient of y, in the shape of x
    recomputed: bool = False  # of a forward that a backward follows: activation recomputation repeats it before that


@dataclass(frozen=True)
class MeteredResults:
    """The tensors that passes returned, in the order of the passes."""

    outputs: tuple[Tensor, ...]  # y of every forward, of any kind
    gradients: tuple[Tensor, ...]  # dL/dx and dL/dweights of every backward


@dataclass(frozen=True)
class Metered:
    """The report of a meter on one rank: scalars by name, all with the same prefix, and what else the meter keeps."""

    values: Mapping[str, float] | None  # None: no overload factors, but a counter or a trace
    step: int
    counts_E: Tensor | None = None  # int64: routed pairs of each expert, of this rank's tokens; None: no counter
    trace: Mapping[tuple[int, int], Tensor] | None = None  # the ids by layer and microbatch; None: no router trace


class LoadMeter(Placed, Protocol):
    """The meter of overload factors, attached to the exchange of the config. It is on at first.

    All ranks make all calls; those of a pipeline stage without MoE layers give no passes.
    """

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Run passes in order through the exchange, with experts of the backend's choice."""

    def report(self, number: int) -> Metered:
        """Report on the step of this number, which has ended; collective, with no microbatch in flight."""

    def switch(self, on: bool) -> None:
        """Switch the meter on or off, right after a report."""


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def load_meter(self, config: Config) -> LoadMeter:
        """Build the exchange with a meter of overload attached; collective."""
        raise Unsupported("this backend offers no meter of overload")
