"""What a chapter gives to be stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
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


def given(inputs: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """Return the inputs of one case by quantity."""
    start = f"{case}/in/"
    return {name.removeprefix(start): value for name, value in inputs.items() if name.startswith(start)}


def named(case: str, side: str, values: Mapping[str, object]) -> dict[str, Tensor]:
    """Name what belongs to one case, and make float64 or int64 tensors of it.

    Args:
        case: In the names.
        side: "in" or "out".
        values: By quantity: tensors, arrays, or numbers in nested sequences, which without any number are of integers;
            truths become 0 and 1.
    """
    found = {}
    for quantity, value in values.items():
        tensor = value.detach().clone() if isinstance(value, Tensor) else _tensor(value)
        found[f"{case}/{side}/{quantity}"] = tensor.double() if tensor.is_floating_point() else tensor.long()
    return found


def _tensor(value: object) -> Tensor:
    array = np.array(value)
    empty = not isinstance(value, np.ndarray) and array.size == 0
    return torch.from_numpy(array.astype(np.int64) if empty else array)
