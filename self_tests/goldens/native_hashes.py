"""Hashes of native's parameters after each step of the stored trajectory: `python -m self_tests.goldens.native_hashes`.

They tell of a change of a single bit, and hold only where they were written: on one rank, by the same torch, on the
same kind of processor. Goldens are written from oracles alone, so that these are kept here. Write them anew where
native's arithmetic changes by intention; the commit message says so.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from moe_conformance.chapters.training.judge.expected import PARAMETERS, seen
from moe_conformance.chapters.training.workloads import golden_script
from moe_conformance.engine import Engine
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.chapter import SINGLE

FILE = Path(__file__).with_suffix(".json")


def made_by() -> dict[str, str]:
    """Return what the bits depend on beside the code."""
    return {"layout": SINGLE.name, "torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}


def of(outcome: Outcome) -> list[str]:
    """Return a hash for every step: of all parameters of the only rank, in the order of their names."""
    found = []
    for step in range(len(outcome.workload.calls)):
        (parameters,) = seen(outcome, step, PARAMETERS)
        digest = hashlib.sha256()
        for key in sorted(parameters, key=str):
            digest.update(f"{key}".encode() + parameters[key].contiguous().numpy().tobytes())
        found.append(digest.hexdigest()[:16])
    return found


def main() -> None:
    """Train native, and write the hashes."""
    workload = golden_script(SINGLE)
    assert workload is not None
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        outcome = moe_step(engine, "native", workload.through("alltoall"))
    FILE.write_text(json.dumps({"made_by": made_by(), "steps": of(outcome)}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
