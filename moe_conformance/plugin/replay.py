"""Runs a drawn workload from a file on ranks and judges it: the smallest example of a failure.

The file is data. It names the backend that failed, which runs unless the command line names another or a plant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from moe_conformance.contract import Backend
from moe_conformance.engine import Engine, EngineError
from moe_conformance.judging.drawn_batch import judge_batch
from moe_conformance.plugin.options import Options, Unusable
from moe_conformance.plugin.repeating import drawn_again
from moe_conformance.plugin.run import Run, engine_needs, prepare
from moe_conformance.plugin.trial import Trial
from moe_conformance.report.records import FAILING
from moe_conformance.reproducing.examining import refusal_of
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.drawn.reading_example import BadExample, backend_of, load
from moe_conformance.workloads.plan import VIRTUAL
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.workload import Workload


def named_backend(path: Path) -> str:
    """Return the backend on which the example in a file failed.

    Raises:
        Unusable: the file holds no example, or names none.
    """
    try:
        return backend_of(path)
    except BadExample as error:
        raise Unusable(f"{path} holds no example: {error}") from error


def replay(path: Path, options: Options, tell: Callable[[str], None]) -> int:
    """Run and judge the example in a file, and print the verdict; return 0 if it passes and 1 if it fails.

    Raises:
        Unusable: the file holds no example, the backend is not there or runs no such workload, or no rank can start.
    """
    run = prepare(options)
    try:
        workload = load(path)
    except BadExample as error:
        raise Unusable(f"{path} holds no example: {error}") from error
    _require_runnable(workload, run.backend, options.device)
    outcome = _outcome(workload, run)
    if refusal := refusal_of(outcome):
        raise Unusable(f"nothing was checked: {refusal[1]}")
    trial = Trial((), "replay")
    trial.judge = partial(judge_batch, tally=trial.tally)
    ended = drawn_again(trial, outcome)
    for line in filter(None, (ended.verdict, ended.message, ended.detail)):
        tell(line)
    return int(ended.verdict in FAILING)


def _require_runnable(workload: Workload, backend: Backend, device: str) -> None:
    variant = workload.config.variant
    if variant not in backend.variants:
        raise Unusable(f"the example is for a variant {variant!r}; the backend has {', '.join(backend.variants)}")
    if limit := broken(backend.limits(variant), workload, device):
        raise Unusable(f"the example is outside a declared limit on {limit.on}: {limit.reason}")


def _outcome(workload: Workload, run: Run) -> Outcome:
    torch.set_num_threads(1)  # the oracles' tensors are tiny
    try:
        virtual = run.options.profile == VIRTUAL
        with Engine(device=run.options.device, virtual=virtual, **engine_needs(run.backend)) as engine:
            return moe_step(engine, run.target, workload)
    except EngineError as error:
        reason = str(error).partition("\n")[0]
        raise Unusable(f"the ranks cannot start: {reason}; try `moe-conformance doctor`") from error
