"""Counts how often the host waits for the GPU while a function runs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
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
            self.start_counting()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the mode is a prototype
                torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            self.stop_counting()

    def start_counting(self) -> None:
        """Begins to take in warnings; the filter that lets each through, not only the first, stays for good."""
        warnings.filterwarnings("always", message=MESSAGE)
        # Below every public hook: a function that records warnings itself replaces those, and shall not see ours.
        self._show = warnings._showwarnmsg  # type: ignore[attr-defined]
        warnings._showwarnmsg = self._take  # type: ignore[attr-defined]

    def stop_counting(self) -> None:
        """Ends what `start_counting` began."""
        warnings._showwarnmsg = self._show  # type: ignore[attr-defined]

    def _take(self, message: warnings.WarningMessage) -> None:
        if str(message.message).startswith(MESSAGE):
            self._seen += 1
        else:
            self._show(message)


class LateError(RuntimeError):
    """The function returned, but work that it had given to the GPU failed."""

    def __init__(self, error: BaseException) -> None:
        first = str(error).partition("\n")[0]
        super().__init__(f"the function returned, but its GPU work failed: {first}")


def wait_for_gpu(device: torch.device) -> None:
    """Waits for all work on a GPU, of whatever stream; does nothing for the CPU.

    It finds what the function has not waited for, and the error of a context that the function knew to be lost and
    went on with. Both would else be raised by the next job that touches the GPU.

    Raises:
        LateError: some of the work failed.
    """
    if device.type == "cpu":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise LateError(error) from error


class MemoryBaseline:
    """How much device memory the process holds between two jobs, and what a job has added to it.

    Only what torch's allocator has handed out counts, to the byte: not what it keeps for reuse, not what NCCL and the
    driver take for themselves.

    Args:
        read: Returns the bytes in use now, as `bytes_in_use` does for a GPU.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._bytes = read()

    def reset(self) -> None:
        """Takes what is in use now as the baseline."""
        self._bytes = self._read()

    def left(self) -> tuple[str, ...]:
        """Says how much more is in use than at the baseline, and makes that the baseline; empty if it is not more.

        Tensors in reference cycles count only if the collector does not free them.
        """
        before = self._bytes
        self.reset()
        if self._bytes > before:
            gc.collect()
            self.reset()
        more = self._bytes - before
        return (f"{more} bytes of device memory",) if more > 0 else ()


def bytes_in_use(device: torch.device) -> Callable[[], int]:
    """Returns a function that reads how many bytes of a GPU the tensors of this process hold.

    Workspaces of cuBLAS, which come with the first product of matrices and stay, are given back first: a later product
    takes them again from what the allocator keeps.
    """

    def read() -> int:
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated(device)

    return read
