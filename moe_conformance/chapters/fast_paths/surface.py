"""Shortcuts of a backend: equal splits, counters of shortcuts, claims. Import them from `contract`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.errors import Unsupported
from moe_conformance.contract.exchange import Resolved

if TYPE_CHECKING:
    from moe_conformance.contract.config import Config


class EqualSplits(Resolved, Protocol):
    """Pads pieces of rows, one for each rank of ep, to one size for an all-to-all, and removes the padding after it."""

    def size(self, pieces: Sequence[int]) -> int:
        """Return the number of rows to which every rank of ep pads its pieces of n_i rows; collective over ep."""

    def pad(self, rows_RD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return every piece followed by zeros, (len(pieces) * size, D), differentiable in the rows."""

    def compact(self, rows_PD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return the first n_i of every `size` rows, concatenated, differentiable in the rows."""


@dataclass(frozen=True)
class Counted:
    """The counts of shortcuts and caches since the last reset, by the backend's names of them."""

    decisions: Mapping[str, tuple[int, int]]  # calls that took the shortcut, and calls that could have and did not
    look_ups: Mapping[str, tuple[int, int]]  # hits and misses of a cache


class Counters(Protocol):
    """Counters of the shortcuts that built experts take. They are off at first; see `contract.Experts`.

    A call of the experts is one decision of each shortcut that is open to it, and looks up once in each cache that it
    uses. The shortcut for equally many rows of each expert is named "equal_counts". Optional: `restrict(ranks)`: all
    ranks of the world but these count nothing.
    """

    def enable(self, on: bool) -> None:
        """Switch counting on or off."""

    def reset(self) -> None:
        """Set all counts to 0; caches stay as they are."""

    def read(self) -> Counted:
        """Return the counts of this rank."""


class SessionPart:
    """The methods of `Session` that build the surfaces of this chapter."""

    def equal_splits(self, config: Config) -> EqualSplits:
        """Build the padding of pieces to equal splits; collective."""
        raise Unsupported("this backend offers no equal splits")


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # With `routing.forced` "round_robin" (FAST-14), the expert at which the ids of a rank begin. any: any expert; zero:
    # expert 0, since the backend's own router begins there, and its exchange relies on it.
    round_robin: Literal["any", "zero"] = "any"
