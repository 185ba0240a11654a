"""Set and compare the global state of a process that a training step should not change."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy
import torch


@contextmanager
def filled_memory() -> Iterator[None]:
    """Fill uninitialised new tensors with NaN, and those of integers with the largest number.

    torch does so only under deterministic algorithms; operations that have none run all the same. The debug mode is
    set, since this does not import a compiler, which takes most of a second on every rank.
    """
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*does not have a deterministic implementation.*")
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch use deterministic algorithms, and raise where it has none."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextmanager
def seeded(number: int, device: torch.device) -> Iterator[None]:
    """Seed every random generator of the process, and restore their states afterwards."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(number)
        random.seed(number)
        numpy.random.seed(number)
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)


def draw(device: torch.device) -> None:
    """Draw a number from every random generator of the process."""
    torch.rand(())
    if device.type == "cuda":
        torch.rand((), device=device)
    random.random()
    numpy.random.random()


def snapshot(device: torch.device) -> dict[str, str]:
    """Return the state that a step must not change, by name: generators, default dtype, modes and flags, threads."""
    generators = {"torch's random state": torch.get_rng_state().numpy().tobytes()}
    if device.type == "cuda":
        generators["CUDA's random state"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    generators["Python's random state"] = repr(random.getstate()).encode()
    numpy_state: Any = numpy.random.get_state()  # name, 624 numbers, and the position
    generators["numpy's random state"] = numpy_state[1].tobytes() + repr(numpy_state[2:]).encode()
    flags = {
        "the default dtype": torch.get_default_dtype(),
        "the grad mode": torch.is_grad_enabled(),
        "the deterministic flag": torch.are_deterministic_algorithms_enabled(),
        "the flag to warn of nondeterminism only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "the number of threads": torch.get_num_threads(),
    }
    hashes = {name: hashlib.sha256(state).hexdigest() for name, state in generators.items()}
    return hashes | {name: str(flag) for name, flag in flags.items()}


@contextmanager
def within(mode: AbstractContextManager[object], changed_state: list[str]) -> Iterator[None]:
    """Enter a grad mode, and note if the backend changed it, before leaving the mode restores it."""
    with mode:
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        yield
        if before != (torch.is_grad_enabled(), torch.is_inference_mode_enabled()):
            changed_state.append("the grad mode")


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the entries that differ."""
    return tuple(name for name, value in before.items() if after[name] != value)
