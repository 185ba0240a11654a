"""Parameters of a workload that nobody may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from torch import Tensor

from moe_conformance.workloads.records.workload import ParameterKey


class DrawnParameters(Mapping[ParameterKey, Tensor]):
    """Parameters by key that are drawn when they are first looked at, and pickled as a dictionary.

    As with `Drawn`: of the workloads of a plan a run wants few.
    """

    def __init__(self, draw: Callable[[], Mapping[ParameterKey, Tensor]]) -> None:
        """Take what draws them all."""
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
