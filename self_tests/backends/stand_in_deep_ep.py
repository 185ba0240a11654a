"""The adapter to DeepEP over the stand-in of its `Buffer`, which is as strict as the kernel.

What it says of the adapter is that the adapter is right, and of DeepEP nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from moe_conformance.backends.deep_ep import DeepEP
from moe_conformance.contract import Limit
from moe_conformance.stand_ins import deep_ep
from moe_conformance.stand_ins.deep_ep import Buffer

__all__ = ["Buffer", "DeepEPStandIn"]


class DeepEPStandIn(DeepEP):
    """The adapter over the stand-in."""

    name: ClassVar[str] = "deep-ep-stand-in"

    def versions(self) -> dict[str, str]:
        """Return the version of torch."""
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> tuple[Limit, ...]:
        """Return none: no GPU is needed."""
        del variant
        return ()

    def library(self) -> Any:
        """Return the stand-in."""
        return deep_ep
