"""Saves and restores the global state of the process that every virtual rank has for itself.

Saved and restored when another rank runs: the random generators of torch (also on the GPU), Python and numpy, the
default dtype, and the mode of deterministic algorithms. Grad mode, autocast and the default device are thread-local in
torch. All else is shared: globals of modules, environment variables, the working directory, the number of threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class _Setting:
    """How one piece of global state is read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


_SETTINGS = (
    _Setting(torch.default_generator.get_state, torch.default_generator.set_state),
    _Setting(random.getstate, random.setstate),
    # Replaces the generator, since its state is large. numpy's stubs lack both functions.
    _Setting(np.random.get_bit_generator, np.random.set_bit_generator),  # type: ignore[attr-defined]
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)
_OF_GPU = _Setting(torch.cuda.get_rng_state, torch.cuda.set_rng_state)


class PerRankState:
    """The global state of every rank; it begins as that of the process.

    Args:
        size: How many ranks there are.
        gpu: Whether the ranks use a GPU.
    """

    def __init__(self, size: int, *, gpu: bool) -> None:
        self._settings = (*_SETTINGS, _OF_GPU) if gpu else _SETTINGS
        states = [[setting.read() for setting in self._settings] for _ in range(size)]
        for state in states:
            state[2] = _copy(state[2])
        self._states = states

    def save(self, number: int) -> None:
        """Saves the present global state as that of a rank."""
        self._states[number] = [setting.read() for setting in self._settings]

    def restore(self, number: int) -> None:
        """Makes the saved state of a rank the global state."""
        for setting, value in zip(self._settings, self._states[number], strict=True):
            setting.write(value)


def _copy(generator: Any) -> Any:
    copy = type(generator)()
    copy.state = generator.state
    return copy
