"""The activation of experts (`Config.activation`), and experts of a new model. Import it from `contract`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Parametrised
from moe_conformance.contract.values import check

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


@dataclass(frozen=True)
class Activation:
    """`Config.activation`: what an expert does between its projections; by default SwiGLU, silu(gate x) * up x."""

    # gelu: z Phi(z); gelu_tanh: its approximation by tanh; squared_relu: the square of relu
    function: Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu"] = "silu"
    gated: bool = True  # False: function(up x), and there is no gate
    # The options below are of gated experts. gate x is clamped to [-infinity, limit], up x to [-limit, limit].
    limit: float | None = None  # None: neither is clamped
    slope: float = 1.0  # of silu: z sigmoid(slope z)
    offset: float = 0.0  # added to up x after the clamp

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "activation.")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"activation.limit = {self.limit!r}; allowed: more than 0, or None")
        if not self.gated and (self.limit, self.slope, self.offset) != (None, 1.0, 0.0):
            raise ValueError("activation.limit, activation.slope and activation.offset are of gated experts")
        if self.function != "silu" and self.slope != 1.0:
            raise ValueError(f"activation.slope = {self.slope!r} is of silu, not of {self.function}")


class SessionPart:
    """What a session builds for this chapter."""

    def initial_experts(self, config: Config) -> Parametrised:
        """Build this rank's experts with the parameters of a new model, as a trainer does; collective.

        Generators of the process have been seeded alike on all ranks, as trainers do; seeding is left to the adapter
        where the backend needs more. No call follows: the parameters are read.
        """
        raise Unsupported("this backend offers no experts with the parameters of a new model")


SECTIONS = {"activation": Activation}
