"""Parameters of a workload that are drawn only when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from torch import Tensor

from moe_conformance.workloads.records.workload import ParameterKey


class DrawnParameters(Mapping[ParameterKey, Tensor]):
    """Parameters by key that are drawn at the first access, and pickled as a dictionary.

    As for `Drawn`, the reason is that a run uses few of the workloads of a plan.
    """

    def __init__(self, draw: Callable[[], Mapping[ParameterKey, Tensor]]) -> None:
        """Keep the function that draws all parameters."""
        self._draw = draw

    @cached_property
    def _parameters(self) -> Mapping[ParameterKey, Tensor]:
        return self._draw()

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[ParameterKey]:
        return iter(self._parameters)

    def __getitem__(self, key: ParameterKey) -> Tensor:
        return self._parameters[key]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return dict, (dict(self._parameters),)
