"""What a backend may offer for shortcuts: equal splits, and counters. Import it from `contract`."""

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
    """Pieces of rows, one for each rank of ep, padded to one number of rows for an all-to-all, and cut back after."""

    def size(self, pieces: Sequence[int]) -> int:
        """Return the rows to which every rank of ep pads its pieces of n_i rows; collective over ep."""

    def pad(self, rows_RD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return every piece with zeros behind it, (len(pieces) * size, D), differentiable in the rows."""

    def compact(self, rows_PD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Return the first n_i rows of every `size`, one piece behind the other, differentiable in the rows."""


@dataclass(frozen=True)
class Counted:
    """What counters of shortcuts have counted since they were reset, by the backend's names of shortcuts and caches."""

    decisions: Mapping[str, tuple[int, int]]  # calls that took the shortcut, and calls that could have and did not
    look_ups: Mapping[str, tuple[int, int]]  # hits and misses of a cache


class Counters(Protocol):
    """Counters of the shortcuts of built experts, which are off at first; see `contract.Experts`.

    A call of the experts is one decision of each shortcut that is open to it, and looks up once in each cache that it
    uses. The shortcut for as many rows of each expert is named "equal_counts". Optional: `restrict(ranks)`, of the
    world, has all others count nothing.
    """

    def enable(self, on: bool) -> None:
        """Count from now on, or no more."""

    def reset(self) -> None:
        """Begin at 0 again; caches stay as they are."""

    def read(self) -> Counted:
        """Return what this rank has counted."""


class SessionPart:
    """What a session builds for this chapter."""

    def equal_splits(self, config: Config) -> EqualSplits:
        """Build what pads pieces to equal splits; collective."""
        raise Unsupported("this backend offers no equal splits")


@dataclass(frozen=True)
class ClaimsPart:
    """What a backend claims of it."""

    # With `routing.forced` "round_robin" (FAST-14), where the ids of a rank begin. any: at any expert; zero: at
    # expert 0, since the backend's own router begins there, and its exchange relies on it.
    round_robin: Literal["any", "zero"] = "any"
