"""What a backend claims about the same tokens on all tp ranks (`Config.token_copies`): part of `contract.Claims`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClaimsPart:
    """The fields of `Claims` of this chapter."""

    # With `Config.token_copies` (EXCH-36). complete: dL/dx and dL/dw are complete on every tp rank; parts: their sum
    # over tp is.
    copies: Literal["complete", "parts"] = "complete"
