"""Device memory that a job leaves allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


class Baseline:
    """How much device memory the process holds between two jobs, and what a job has added to it.

    Only what torch's allocator has handed out counts, to the byte: not what it keeps for reuse, not what NCCL and the
    driver take for themselves.

    Args:
        read: Returns the bytes in use now, as `in_use` does for a GPU.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._bytes = read()

    def settle(self) -> None:
        """Takes what is in use now as the baseline."""
        self._bytes = self._read()

    def left(self) -> tuple[str, ...]:
        """Says how much more is in use than at the baseline, and makes that the baseline; empty if it is not more.

        Tensors in reference cycles count only if the collector does not free them.
        """
        before = self._bytes
        self.settle()
        if self._bytes > before:
            gc.collect()
            self.settle()
        more = self._bytes - before
        return (f"{more} bytes of device memory",) if more > 0 else ()


def in_use(device: torch.device) -> Callable[[], int]:
    """Returns a function that reads how many bytes of a GPU the tensors of this process hold.

    Workspaces of cuBLAS, which come with the first product of matrices and stay, are given back first: a later product
    takes them again from what the allocator keeps.
    """

    def read() -> int:
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated(device)

    return read
