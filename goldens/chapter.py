"""What a chapter gives to be stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Chapter:
    """Inputs, and what the oracles make of them.

    Attributes:
        seed: Of the inputs.
        requirements: Whose oracles work them out.
        draw: Returns the inputs by name, `case/in/quantity`.
        work_out: Returns from the inputs, by name, `case/out/quantity`.
    """

    seed: int
    requirements: tuple[str, ...]
    draw: Callable[[np.random.Generator], Mapping[str, Tensor]]
    work_out: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
