"""Whose parameters a script may change: those that windows are on, and no tensor that is made at every read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_conformance.chapters.fast_paths.scenario.changing_experts import ChangingExperts
from moe_conformance.chapters.fast_paths.workloads import weights
from moe_conformance.contract import Named, Read, Unsupported
from moe_conformance.workloads.chapter import SINGLE
from moe_conformance.workloads.records.changes import Way


class Experts:
    """Two experts in one parameter, of which every read gives what `shown` makes of it."""

    def __init__(self, shown: Callable[[nn.Parameter], Tensor]) -> None:
        self.weight, self.shown = nn.Parameter(torch.randn(2, 3, 4)), shown

    def named(self, read: Read) -> Iterator[Named]:
        """Yield a window for each expert."""
        for n in range(2):
            yield Named("gate", n, read(self.shown(self.weight))[n])


def as_parameter(weight: nn.Parameter) -> Tensor:
    """Return a new view that is a Parameter for `isinstance`, as the local tensor of a DTensor is."""
    view: Any = weight.detach()
    view._is_param = True
    return view  # type: ignore[no-any-return]


def changing(shown: Callable[[nn.Parameter], Tensor], way: Way) -> ChangingExperts:
    """The surface of a script that changes these experts in that way."""
    workload = weights.changed("changed", (way,), ("no_grad",), SINGLE, torch.float32, 2)
    session: Any = SimpleNamespace(grad_attr=lambda parameter: "grad")
    return ChangingExperts(Experts(shown), session, workload, 0)


class TestShown:
    def test_parameters_may_be_changed(self) -> None:
        """The same object at every read."""
        found = changing(lambda weight: weight, "a step of an optimiser")
        assert 1 == len(found._parameters())

    @pytest.mark.parametrize("shown", [as_parameter, nn.Parameter.detach], ids=["for isinstance", "a plain tensor"])
    def test_a_new_tensor_at_every_read_is_no_parameter(self, shown: Callable[[nn.Parameter], Tensor]) -> None:
        """An optimiser that steps it, or a Parameter that replaces it, changes nothing that the experts use."""
        assert isinstance(as_parameter(nn.Parameter(torch.zeros(1))), nn.Parameter)
        with pytest.raises(Unsupported, match="show parts of parameters"):
            changing(shown, "a step of an optimiser")
