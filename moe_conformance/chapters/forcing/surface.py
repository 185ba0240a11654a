"""What a backend may offer for forced routing. Import it from `contract`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClaimsPart:
    """What a backend claims of it."""

    # Loads of forced routing (BIAS-07). ignored: the balance bias does not change; counted: it is updated by them as
    # by others.
    forced_loads: Literal["ignored", "counted"] = "ignored"
