"""Capacity of experts and receive buffers: `Config.capacity`, `Config.receive_buffer`, claims.

Import them from `contract`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_conformance.contract.values import check


@dataclass(frozen=True)
class Capacity:
    """`Config.capacity`: the token drop of a router, and the padding of an exchange to the capacity."""

    factor: float | None = None  # capacity C = ceil(factor K T / E) per expert and rank; None: no token drop
    minimum: int = 0  # lower bound of C
    drop_policy: Literal["weights", "position"] = "weights"  # kept: the slots of highest weight, or of the first tokens
    padded: bool = False  # each rank sends C rows to each expert; without a factor C is the group's top load

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "capacity.", factor=0, minimum=0)


@dataclass(frozen=True)
class ReceiveBuffer:
    """`Config.receive_buffer`: a receive buffer of fixed size, if `factor` or `rows` is given; not both."""

    factor: float | None = None  # its size as a multiple of the balanced load of a rank
    rows: int | None = None  # its size as a number of rows
    overflow: Literal["refuse", "drop"] = "refuse"  # rows beyond the receive buffer: raise `Overflow`, or drop them

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        check(self, "receive_buffer.", rows=0)
        if self.factor is not None and self.factor <= 0:
            raise ValueError(f"receive_buffer.factor = {self.factor!r}; allowed: more than 0")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # With `drop_policy` "position" (DROP-06). tokens: slots are kept in the order of tokens; choices: first choices of
    # all tokens before any second choice.
    drop_order: Literal["tokens", "choices"] = "tokens"
    # With `drop_policy` "weights" (DROP-05). weights: the slots that are kept are those of the highest routing weights;
    # scores: those of the highest scores of the router, without expert bias, normalisation and scale.
    drop_by: Literal["weights", "scores"] = "weights"
    # How a capacity that is not a whole number is rounded (DROP-01).
    capacity_rounding: Literal["up", "down"] = "up"
    # With a capacity and `routing.normalise` (DROP-09, DROP-11). selected: weights are divided by the sum over all
    # slots that a token selected; kept: by the sum over those of them that were kept.
    normalised_over: Literal["selected", "kept"] = "selected"
    # tp: a capacity that drops nothing is rounded up to a multiple of tp, whose ranks share the rows (DROP-08).
    capacity_over: Literal["tp"] | None = None


SECTIONS = {"capacity": Capacity, "receive_buffer": ReceiveBuffer}
