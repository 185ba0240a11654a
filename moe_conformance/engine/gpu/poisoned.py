"""Errors of a GPU that show after the call that caused them, and spoil all that the process does there next.

After an illegal address, a failed assertion on the device or a failed launch a CUDA context answers every call with the
same error until its process ends. A rank's process ends after any exception, so such an error need only be raised
in time: by the job that caused it.
"""

from __future__ import annotations

import torch


class LateError(RuntimeError):
    """The function returned, but work that it had given to the GPU failed."""

    def __init__(self, error: BaseException) -> None:
        first = str(error).partition("\n")[0]
        super().__init__(f"the function returned, but its GPU work failed: {first}")


def check(device: torch.device) -> None:
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
