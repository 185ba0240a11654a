"""Checks around every job on a GPU: host synchronisations, failed asynchronous work, leaked device memory."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from types import TracebackType

import torch

MESSAGE = "called a synchronizing CUDA operation"  # torch's warning in the synchronisation debug mode "warn"


class HostSyncs:
    """Counts, and suppresses, torch's warnings of host synchronisations in a block.

    Torch warns of blocking copies to the host, of `item()`, `nonzero()` and the like, in backward passes too. It does
    not warn of `torch.cuda.synchronize()`, of waiting for an event, nor of synchronisation in torch.distributed and
    other libraries; and code that suppresses all warnings suppresses these. The count is therefore a lower bound.

    Args:
        device: The device that the function uses; on the CPU nothing is changed and nothing counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seen = 0

    @property
    def count(self) -> int | None:
        """The number of host synchronisations so far; None on the CPU."""
        return self._seen if self._on_gpu else None

    def __enter__(self) -> HostSyncs:
        if self._on_gpu:
            self.start_counting()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
                torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            self.stop_counting()

    def start_counting(self) -> None:
        """Starts counting; the warnings filter that this adds is not removed again."""
        warnings.filterwarnings("always", message=MESSAGE)
        # Not a public hook: a function that records warnings replaces those, and must not see these warnings.
        self._show = warnings._showwarnmsg  # type: ignore[attr-defined]
        warnings._showwarnmsg = self._take  # type: ignore[attr-defined]

    def stop_counting(self) -> None:
        """Restores the hook that `start_counting` replaced."""
        warnings._showwarnmsg = self._show  # type: ignore[attr-defined]

    def _take(self, message: warnings.WarningMessage) -> None:
        if str(message.message).startswith(MESSAGE):
            self._seen += 1
        else:
            self._show(message)


class LateError(RuntimeError):
    """The function returned, but GPU work that it had launched failed."""

    def __init__(self, error: BaseException) -> None:
        first = str(error).partition("\n")[0]
        super().__init__(f"the function returned, but its GPU work failed: {first}")


def wait_for_gpu(device: torch.device) -> None:
    """Waits for all work on a GPU, on every stream; does nothing for the CPU.

    After an illegal address, a failed assertion on the device or a failed launch a CUDA context answers every call with
    the same error until its process exits. A rank exits after any exception, so that it is enough to raise the error in
    the job that caused it. This finds work that the function has not waited for, and an error that the function has
    ignored.

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
    """The device memory that the process holds between jobs, to tell what a job adds.

    Only memory that torch's allocator has handed out counts, to the byte: neither what it caches, nor what NCCL and the
    driver allocate.

    Args:
        read: Returns the bytes in use now, as `bytes_in_use` does for a GPU.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._bytes = read()

    def reset(self) -> None:
        """Makes the memory in use now the baseline."""
        self._bytes = self._read()

    def left(self) -> tuple[str, ...]:
        """Returns how much more memory is in use than at the baseline, if any, and resets the baseline.

        Tensors in reference cycles count only if the garbage collector does not free them.
        """
        before = self._bytes
        self.reset()
        if self._bytes > before:
            gc.collect()
            self.reset()
        more = self._bytes - before
        return (f"{more} bytes of device memory",) if more > 0 else ()


def bytes_in_use(device: torch.device) -> Callable[[], int]:
    """Returns a function that reads how many bytes of a GPU this process's tensors hold.

    The workspaces of cuBLAS, which the first matrix product allocates and nothing frees, are freed first: a later
    product allocates them again from the allocator's cache.
    """

    def read() -> int:
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated(device)

    return read
