"""What a backend claims about values that are not finite. It is part of `contract.Claims`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # What a value that is not finite reaches (EXCH-41, EXCH-42). own: its own token and experts; all: any token and
    # expert of the exchange group, as in a product with one-hot tensors, which multiplies it by 0. With "all" these two
    # are reported as not adapted where something else is not finite; what is finite is judged all the same.
    non_finite: Literal["own", "all"] = "own"
