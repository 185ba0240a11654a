"""What a backend may offer for overload factors. Import it from `contract`."""

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
    """One pass of a step: "alone" is a training forward without a gradient, "abandon" gives up what came before it.

    A backward is that of the forward of its layer and microbatch. Padding has empty slots, as a drop has.
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
    """What passes returned, in their order."""

    outputs: tuple[Tensor, ...]  # y of every forward, of any kind
    gradients: tuple[Tensor, ...]  # dL/dx and dL/dweights of every backward


@dataclass(frozen=True)
class Metered:
    """What a rank reports: scalars by name, with a prefix that is the same for all, and what else it has."""

    values: Mapping[str, float]
    step: int
    counts_E: Tensor | None = None  # int64: routed pairs of each expert, of this rank's tokens; None: no counter
    trace: Mapping[tuple[int, int], Tensor] | None = None  # the ids by layer and microbatch; None: no router trace


class LoadMeter(Placed, Protocol):
    """The meter of overload factors, attached to the exchange of the config. It is on at first.

    All ranks make all calls; those of a stage without such layers pass nothing.
    """

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Run passes in order through the exchange, with experts of the backend's choice."""

    def report(self, number: int) -> Metered:
        """Tell the meter that the step of this number has ended; collective, with no microbatch in flight."""

    def switch(self, on: bool) -> None:
        """Switch the meter on or off, right after a report."""


class SessionPart:
    """What a session builds for this chapter."""

    def load_meter(self, config: Config) -> LoadMeter:
        """Build the exchange with a meter of overload attached; collective."""
        raise Unsupported("this backend offers no meter of overload")
