"""Workloads of activations lie on both sides of every limit, and on no place where a derivative jumps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_conformance.chapters.experts.workloads import OF_ACTIVATIONS, activated
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records.workload import Workload

EP2 = Layout(2, ep=2)


def projected(workload: Workload, name: str) -> Tensor:
    """Return what a projection gives for all tokens of all ranks under all experts, in float64."""
    x_TD = torch.cat([batch.x_TD for batch in workload.batches[0]]).double()
    found = []
    for (each, expert), matrix_FD in workload.parameters.items():
        if each == name:
            bias_F = workload.parameters.get((f"bias_{name}", expert), torch.zeros(len(matrix_FD)))
            found.append(x_TD @ matrix_FD.double().T + bias_F.double())
    return torch.cat(found)


@pytest.mark.parametrize("workload", list(activated("alltoall", EP2, "full")), ids=lambda workload: workload.name)
class TestActivations:
    def test_numbers_before_it_are_halves_of_odd_numbers(self, workload: Workload) -> None:
        """So they are exact in every dtype, and neither 0 nor a limit that is a whole number."""
        for name in ("gate", "up") if workload.config.activation.gated else ("up",):
            numbers = projected(workload, name)
            assert bool(((2 * numbers) % 2 == 1).all())
            assert 64 > float(numbers.abs().max())

    def test_limits_are_reached_on_both_sides(self, workload: Workload) -> None:
        """Some numbers are cut above, some below, and some not at all."""
        limit = workload.config.activation.limit
        if limit is None:
            return
        for name in ("gate", "up"):
            numbers = projected(workload, name)
            for part in (numbers > limit, numbers < -limit, numbers.abs() < limit):
                assert 20 < int(part.sum())


class TestNames:
    def test_every_activation_is_there(self) -> None:
        """Each function that a config may ask for is in some workload."""
        functions = {recipe.config.get("activation.function", "silu") for recipe in OF_ACTIVATIONS}
        assert {"silu", "gelu", "gelu_tanh", "relu", "squared_relu"} == functions
