"""Steps of which nothing is kept, and how many bytes the process has allocated after them, by whatever means."""

from __future__ import annotations

import ctypes
import gc
from functools import cache
from typing import cast

import torch

from moe_conformance.contract import Config, Exchange, Layer, SplitExchange, whole
from moe_conformance.scenarios.inputs import Inputs
from moe_conformance.scenarios.probe import Probe
from moe_conformance.workloads.records.workload import Batch

LONGER = 64  # times the tokens: what a backend keeps of them is more than what the suite writes down of its calls


def longer(batch: Batch) -> Batch:
    """Return a batch with its tokens `LONGER` times."""
    tensors = (batch.x_TD, batch.ids_TK, batch.weights_TK, batch.upstream)
    return Batch(*(each.repeat(LONGER, 1) for each in tensors))


def take_and_forget(surface: Exchange | SplitExchange | Layer, inputs: Inputs, config: Config) -> None:
    """Take a forward and a backward, with an exchange those of a probe of their own.

    No argument, result or gradient of a token is referred to later.
    """
    output = _output(surface, inputs, config)
    torch.autograd.backward(output, inputs.upstream.to(output.dtype).reshape(output.shape))


def _output(surface: Exchange | SplitExchange | Layer, inputs: Inputs, config: Config) -> torch.Tensor:
    if not hasattr(surface, "local_experts"):
        return surface(inputs.x)
    exchange = cast("Exchange | SplitExchange", surface)
    probe = Probe(config, tuple(exchange.local_experts), part=1.0)
    return whole(exchange)(inputs.x, inputs.routing, probe)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc, see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use(device: torch.device) -> int | None:
    """Return how many bytes are allocated in this process, after garbage is collected.

    On a GPU what torch's allocator has handed out there. On a CPU what malloc has handed out to anybody: to tensors,
    which torch's CPU allocator takes from it one by one, to NumPy, to libraries in C++, and to objects of Python of
    more than 512 bytes; of those up to 512 nothing is seen. None where the C library cannot tell (all but glibc 2.33
    and later).
    """
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    libc = _libc()
    if libc is None:
        return None
    told = libc.mallinfo2()
    return int(told.uordblks + told.hblkhd)


@cache
def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _MallInfo
    return libc
