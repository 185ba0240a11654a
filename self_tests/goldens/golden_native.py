"""What tests of native against goldens share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.goldens import stored_values


def of(chapter: str) -> dict[str, Tensor]:
    """Return what a chapter stores."""
    return stored_values.read(stored_values.folder(), chapter)


def case_of(values: Mapping[str, Tensor], case: str, way: str) -> dict[str, Tensor]:
    """Return the inputs or outputs of a case, by quantity."""
    return {name.split("/")[2]: value for name, value in values.items() if name.startswith(f"{case}/{way}/")}


def assert_near(actual: Tensor, stored: Tensor) -> None:
    """Require the stored values, up to a few roundings of float64."""
    torch.testing.assert_close(actual.detach().to(stored.dtype), stored, rtol=1e-12, atol=1e-13)


@dataclass(frozen=True)
class AlmostAlone:
    """The topology of a rank that needs no group, only its number among others."""

    rank: int = 0
    others: int = 1

    def ranks(self, name: str) -> tuple[int, ...]:
        """Name all ranks."""
        return tuple(range(self.others))

    def group(self, name: str) -> None:
        """There is none."""
