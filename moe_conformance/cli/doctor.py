"""Prints what this machine can run, and why not the rest: versions, transports, GPUs, backends, layouts, two ranks.

On request it also causes every kind of rank failure in the engine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch
import torch.distributed as dist

from moe_conformance.cli import catalogue
from moe_conformance.engine import Engine, EngineError, Job, RankContext
from moe_conformance.engine.drill import FAULTS, Drill, table
from moe_conformance.workloads.selection import profiles
from moe_conformance.workloads.selection.profiles import too_large

Say = Callable[[str], None]


def examine(ranks: int, say: Say) -> int:
    """Print all of it, line by line; return 0 if ranks can start and 2 if not."""
    say(f"moe-conformance {version('moe-conformance')}, Python {platform.python_version()}, {os.cpu_count()} CPUs")
    say(f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")
    say(f"gloo: {'available' if dist.is_gloo_available() else 'missing: --device cpu needs a torch that has it'}")
    say(f"nccl: {'available' if dist.is_nccl_available() else 'missing: --device cuda needs a CUDA build of torch'}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    say(f"GPUs: {', '.join(gpus) or 'none; --device cuda cannot run here'}")
    _backends(say)
    _layouts(ranks, say)
    return _ranks(say)


def drill(worlds: Sequence[int], times: int, say: Say) -> int:
    """Cause every known fault of a rank; return 0 if the engine handles all, 1 if not, 2 if ranks cannot start."""
    sizes = " and ".join(map(str, worlds))
    say(f"{len(FAULTS)} kinds of rank failure, each {times} times with {sizes} ranks:")
    trials = []
    try:
        with Drill(worlds) as scene:
            for trial in scene.run(times):
                trials.append(trial)
                for sentence in trial.wrong:
                    say(f"wrong: {trial.fault.name}, {trial.world} ranks: {sentence}")
    except EngineError as error:
        say(f"the ranks cannot start: {error}")
        return 2
    for line in table(trials):
        say(line)
    right = sum(not trial.wrong for trial in trials)
    say(f"{right} of {len(trials)} right")
    return 0 if right == len(trials) else 1


def _backends(say: Say) -> None:
    say("backends:")
    for line in catalogue.backend_lines(importable=False):
        say(f"  {line}")


def _layouts(ranks: int, say: Say) -> None:
    """Print which layouts of the full profile fit; more ranks than CPUs work, slowly."""
    say(f"layouts for --ranks {ranks}:")
    quick = profiles.layouts("quick")
    for layout in profiles.layouts("full"):
        profile = "quick" if layout in quick else "full"
        say(f"  {layout.name} ({profile}): {too_large(layout, ranks) or f'{layout.world} ranks'}")


def _ranks(say: Say) -> int:
    try:
        with Engine(preload=("moe_conformance.cli.doctor",)) as engine:
            result = engine.run(
                Job("moe_conformance.cli.doctor:add_up", payload=1, world=2, groups={}, deadline_s=30.0)
            )
    except EngineError as error:
        say(f"two ranks: cannot start: {error}")
        return 2
    fault = next((rank.error for rank in result.ranks if rank.error), None)
    if fault is not None or [rank.value for rank in result.ranks] != [3, 3]:
        say(f"two ranks: started, but an all-reduce over loopback failed: {fault or 'a wrong sum'}")
        return 2
    say("two ranks: started, all-reduce over gloo is correct")
    return 0


def add_up(context: RankContext, payload: int) -> int:
    """Return the sum of (rank + payload) over the world: 3 for two ranks and a payload of 1."""
    total = torch.tensor(context.rank + payload)
    dist.all_reduce(total)
    return int(total)
