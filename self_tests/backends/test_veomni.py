"""The adapter to VeOmni, held against the oracle by itself: no judge of the suite takes part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from moe_conformance.backends.veomni import VeOmni
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.workloads import recipes
from self_tests.backends.dense import oracle, seen

if find_spec("veomni") is None:
    pytest.skip("VeOmni is not installed", allow_module_level=True)
NAME = "moe_conformance.backends.veomni:VeOmni"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks."""
    VeOmni().versions()
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        yield engine


def test_importing_the_adapter_does_not_import_the_library() -> None:
    """A driver that only lists backends stays light."""
    code = "import sys, moe_conformance.backends.veomni; sys.exit('veomni' in sys.modules)"
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, ep=2), Layout(4, ep=2)], ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", ["uneven", "rank-without-tokens", "in-flight-uneven"])
def test_it_computes_the_layer(engine: Engine, layout: Layout, name: str) -> None:
    """Output and gradients of the suite's expert equal the dense formulation to the bit."""
    workload = next((w for w in recipes.corpus("alltoall", layout, "full") if w.name == name), None)
    if workload is None:
        pytest.skip("one rank has no workload of that name")
    outcome = moe_step(engine, NAME, workload)
    assert {"ok"} == {rank.status for rank in outcome.ranks}
    expected, (y, dx, dweights) = oracle(workload), seen(outcome)
    assert torch.equal(expected.y_TD, y)
    assert torch.equal(expected.dx_TD, dx)
    assert torch.equal(expected.dweights_TK, dweights)


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, ep=2), Layout(4, ep=4)], ids=lambda layout: layout.name)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_its_experts_have_the_gradients_of_all_ranks(engine: Engine, layout: Layout, limit: float | None) -> None:
    """Behind the backward that is written by hand, over stand-ins for kernels, with and without a clamp that is met."""
    workload = next(w for w in recipes.corpus("alltoall", layout, "full") if w.name == "own-even")
    workload = replace(workload, config=workload.config.changed({"activation.limit": limit}))
    outcome = moe_step(engine, NAME, workload)
    assert {"ok"} == {rank.status for rank in outcome.ranks}, [rank.error for rank in outcome.ranks]
    assert "group_gemm_same_nk, group_gemm_same_mn" in outcome.ranks[0].resolved.values()
    expected = oracle(workload)
    largest = max(float(value.abs().max()) for value in expected.parameters.values())
    errors = [
        float((grad.value.double() * layout.world - expected.parameters[key]).abs().max()) / largest
        for rank in outcome.ranks
        for key, grad in (rank.grads_final or {}).items()
        if grad.value is not None
    ]
    assert len(expected.parameters) == len(errors)
    assert (limit is None) == (max(errors) < 1e-6)
