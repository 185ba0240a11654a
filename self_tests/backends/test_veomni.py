"""The adapter to VeOmni, held against the oracle by itself: no judge of the suite takes part."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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
