"""Delays a CUDA stream at every collective, so that a missing wait shows as wrong numbers.

Compute and communication overlap on different streams, and a missing wait between them has an effect only if the stream
that should be waited for is late. It seldom is, unless a kernel that does nothing delays it:

* "delayed_communication": an asynchronous collective begins late. Code that reads its output, or changes its input,
  before `wait()` then does so before the transfer.
* "delayed_compute": computation around a collective is late. A collective that is issued on another stream, which does
  not wait for its input, then sends old data.

At the first collective of a group NCCL makes its connections, which takes longer than the delay: the delay has an
effect from the second collective on.

On the CPU hidden buffers do the same, and with certainty (asynchrony "poisoned").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, cast, get_args

import torch

from ..records import EngineError

Mode = Literal["delayed_compute", "delayed_communication"]
MODES: tuple[str, ...] = get_args(Mode)

# About 10 ms: far longer than the host takes to load and launch the kernels that follow.
_CYCLES = 20_000_000


def check(asynchrony: str, device: str) -> None:
    """Raises if an asynchrony mode is not available on the device.

    Raises:
        EngineError: names the modes that are available.
    """
    if asynchrony in MODES and device == "cpu":
        raise EngineError(f"asynchrony {asynchrony!r} delays streams of a GPU; on the CPU use 'poisoned'")
    if asynchrony == "poisoned" and device != "cpu":
        raise EngineError(f"asynchrony 'poisoned' hides buffers of the CPU; on a GPU use {' or '.join(MODES)}")


def late(mode: Mode, asynchronous: bool) -> Literal["compute", "communication"] | None:
    """Returns which side of a collective is delayed; None if neither is.

    A blocking collective is no asynchronous communication, and may use the stream of the computation; the computation
    around it can still be delayed. The same holds for coalesced calls, which have a handle only together.
    """
    if mode == "delayed_compute":
        return "compute"
    return "communication" if asynchronous else None


class Delays:
    """Delays of one mode on the current GPU."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._compute = torch.cuda.default_stream()
        self._before_communication = torch.cuda.Stream()

    @contextlib.contextmanager
    def around(self, asynchronous: bool) -> Iterator[None]:
        """Delays one side of the collective that is called in the block.

        A process group starts a collective once the current stream has reached the point where it was issued. The
        current stream is therefore replaced, in the block, by one that waits for it and then sleeps; the caller's
        stream does not sleep.
        """
        side = late(self._mode, asynchronous)
        if side == "compute":
            with torch.cuda.stream(self._compute):
                torch.cuda._sleep(_CYCLES)
            yield
        elif side == "communication":
            self._before_communication.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._before_communication):
                torch.cuda._sleep(_CYCLES)
                yield
        else:
            yield


def of(asynchrony: str) -> Delays | None:
    """Returns the delays that an asynchrony mode asks for; None if it asks for none."""
    return Delays(cast(Mode, asynchrony)) if asynchrony in MODES else None
