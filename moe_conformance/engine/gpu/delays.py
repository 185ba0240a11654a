"""Makes one of a GPU's streams late at every collective, so that code which does not wait reads what is not there yet.

Compute and communication overlap on different streams, and a missing wait between them shows only where the one that is
waited for is late. It seldom is; a kernel that does nothing for a while makes it so:

* "delayed_communication": an asynchronous collective begins late. Code that reads its output, or changes its input,
  before `wait()` then does so before the transfer.
* "delayed_compute": what is computed around a collective is late. A collective that was issued on a stream of its own,
  and not told to wait for its input, then sends what was there before.

At the first collective of a group NCCL makes its connections, which takes longer than the delay: it counts from the
second on.

On the CPU hidden buffers do the same without any luck (asynchrony "poisoned").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, cast, get_args

import torch

from ..records import EngineError

Mode = Literal["delayed_compute", "delayed_communication"]
MODES: tuple[str, ...] = get_args(Mode)

_CYCLES = (
    20_000_000  # about 10 ms: far longer than the host takes to issue the kernels that follow, loading them included
)


def check(asynchrony: str, device: str) -> None:
    """Refuses delays where there are no streams, and poison where buffers are not hidden.

    Raises:
        EngineError: says what to ask for instead.
    """
    if asynchrony in MODES and device == "cpu":
        raise EngineError(f"asynchrony {asynchrony!r} delays streams of a GPU; on the CPU ask for 'poisoned'")
    if asynchrony == "poisoned" and device != "cpu":
        raise EngineError(f"asynchrony 'poisoned' hides buffers of the CPU; on a GPU ask for {' or '.join(MODES)}")


def late(mode: Mode, asynchronous: bool) -> Literal["compute", "communication"] | None:
    """Returns which side of a collective is made late, if any.

    A collective that is waited for on the spot is no asynchronous communication, and its stream may be that of the
    computation; the computation around it can be late all the same. So with calls that have a handle only as a whole.
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
        """A block in which a collective is issued, with one side late.

        A process group starts a collective when the current stream has come to where it was issued. So the current
        stream is replaced for the block by one that follows it, and then sleeps: the one that the caller goes on with
        does not.
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
    """Returns the delays that a job asks for, if any."""
    return Delays(cast(Mode, asynchrony)) if asynchrony in MODES else None
