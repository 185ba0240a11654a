"""What the goldens hold, one chapter of the law a file.

A chapter draws inputs and works them out with reference/, never with a backend. Its SEED and REQUIREMENTS stand in the
manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from goldens.chapters import exchange, experts, routing


class Chapter(Protocol):
    """A module of this package."""

    SEED: int
    REQUIREMENTS: tuple[str, ...]

    @staticmethod
    def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
        """Return the inputs by name, `case/in/quantity`."""

    @staticmethod
    def work_out(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return by name, `case/out/quantity`, what the oracles make of inputs."""


def chapters() -> Mapping[str, Chapter]:
    """Return all chapters by name."""
    return {"exchange": exchange, "experts": experts, "routing": routing}
