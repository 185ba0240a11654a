"""What a backend may offer for values that are not finite. Import it from `contract`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClaimsPart:
    """What a backend claims of it."""

    # What a value that is not finite reaches (EXCH-41, EXCH-42). own: its own token and experts; all: any token and
    # expert of the exchange group, as in a product with one-hot tensors, which multiplies it by 0. With "all" these two
    # are reported as not adapted where something else is not finite; what is finite is judged all the same.
    non_finite: Literal["own", "all"] = "own"
