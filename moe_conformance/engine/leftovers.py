"""What a function leaves behind in its process beside what it returns."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import processes

TORCH_VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR",
)  # set when its compiler is imported, as the first functional collective does


@dataclass(frozen=True)
class ProcessState:
    """The state of a process that a function could change for whatever runs there next."""

    threads: frozenset[threading.Thread]  # Python's; those of torch and of the transport are its own affair
    processes: Mapping[int, str]
    variables: Mapping[str, str]
    folder: str
    modes: Mapping[str, object]
    groups: int


def process_state(own_groups: int = 0) -> ProcessState:
    """Takes note of the process as it is now; `own_groups` of its process groups are the engine's."""
    modes = {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the grad mode": torch.is_grad_enabled(),
        "the deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "the number of threads": torch.get_num_threads(),
    }
    groups = len(dist.distributed_c10d._world.pg_map) - own_groups
    return ProcessState(
        frozenset(threading.enumerate()), processes.running_children(), os.environ.copy(), _folder(), modes, groups
    )


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # a function may remove the folder that it went to
        return ""


def difference(before: ProcessState, after: ProcessState) -> tuple[str, ...]:
    """Says what is otherwise than before, one item each; a thread, process or group that has ended is no difference."""
    started = sorted(thread.name for thread in after.threads - before.threads)
    names = sorted(before.variables.keys() | after.variables.keys())
    changed = [
        name
        for name in names
        if before.variables.get(name) != after.variables.get(name) and name not in TORCH_VARIABLES
    ]
    groups = after.groups - before.groups
    return (
        *(f"thread {name!r}" for name in started),
        *(f"process {command!r}" for pid, command in after.processes.items() if pid not in before.processes),
        *(f"environment variable {name!r}" for name in changed),
        *(["the working directory"] if before.folder != after.folder else []),
        *([f"{groups} process group{'s' if groups > 1 else ''}"] if groups > 0 else []),
        *(mode for mode, value in before.modes.items() if after.modes[mode] != value),
    )
