"""What a backend claims about forced routing. It is part of `contract.Claims`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # What the loads of forced routing do to a balance bias (BIAS-07). ignored: it does not change; counted: it is
    # updated by them as by others.
    forced_loads: Literal["ignored", "counted"] = "ignored"
