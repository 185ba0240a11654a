"""Counts how often the host waits for the GPU while a function runs."""

from __future__ import annotations

import warnings
from types import TracebackType

import torch

MESSAGE = "called a synchronizing CUDA operation"  # torch's warning, once the synchronisation debug mode is "warn"


class HostSyncs:
    """A block in which torch's warnings of host synchronisations are counted and go no further.

    Torch warns of copies to the host that are waited for, of `item()`, `nonzero()` and the like, in backward passes
    too. It does not warn of `torch.cuda.synchronize()`, of waiting for an event, nor of what torch.distributed, other
    libraries and kernels of their own do; and code that filters all warnings out hides its own. So the count is a
    lower bound.

    Args:
        device: Where the function works; on the CPU nothing is set and nothing counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seen = 0

    @property
    def count(self) -> int | None:
        """The number so far; None on the CPU."""
        return self._seen if self._on_gpu else None

    def __enter__(self) -> HostSyncs:
        if self._on_gpu:
            self.listen()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the mode is a prototype
                torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            self.ignore()

    def listen(self) -> None:
        """Begins to take in warnings; the filter that lets each through, not only the first, stays for good."""
        warnings.filterwarnings("always", message=MESSAGE)
        # Below every public hook: a function that records warnings itself replaces those, and shall not see ours.
        self._show = warnings._showwarnmsg  # type: ignore[attr-defined]
        warnings._showwarnmsg = self._take  # type: ignore[attr-defined]

    def ignore(self) -> None:
        """Ends what `listen` began."""
        warnings._showwarnmsg = self._show  # type: ignore[attr-defined]

    def _take(self, message: warnings.WarningMessage) -> None:
        if str(message.message).startswith(MESSAGE):
            self._seen += 1
        else:
            self._show(message)
