"""Detects what a function has changed in its process and not undone: threads, children, variables, modes."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import processes

# Set when torch's compiler is imported, as the first functional collective does.
TORCH_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR",)


@dataclass(frozen=True)
class ProcessState:
    """The state of a process that a function could change for the job after it."""

    threads: frozenset[threading.Thread]  # Python's, without those of torch and of the transport
    processes: Mapping[int, str]
    variables: Mapping[str, str]
    folder: str
    modes: Mapping[str, object]
    groups: int


def process_state(own_groups: int = 0) -> ProcessState:
    """Reads the state of this process; `own_groups` of its process groups are the engine's."""
    modes = {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the grad mode": torch.is_grad_enabled(),
        "the deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "the number of threads": torch.get_num_threads(),
    }
    groups = process_groups() - own_groups
    return ProcessState(
        frozenset(threading.enumerate()), processes.running_children(), os.environ.copy(), _folder(), modes, groups
    )


def process_groups() -> int:
    """Returns the number of process groups of this process, the default one and the engine's included."""
    return len(dist.distributed_c10d._world.pg_map)


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # a function may remove the folder that it went to
        return ""


def difference(before: ProcessState, after: ProcessState) -> tuple[str, ...]:
    """Returns what has changed, one item each; an ended thread, child or group is no change."""
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
