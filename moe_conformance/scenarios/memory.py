"""Run steps without keeping their results, and measure the bytes that the process has allocated after them."""

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

LONGER = 64  # factor on the tokens: what a backend keeps of them exceeds what the suite records of its calls


def longer(batch: Batch) -> Batch:
    """Return a batch with its tokens repeated `LONGER` times."""
    tensors = (batch.x_TD, batch.ids_TK, batch.weights_TK, batch.upstream)
    return Batch(*(tensor.repeat(LONGER, 1) for tensor in tensors))


def take_and_forget(surface: Exchange | SplitExchange | Layer, inputs: Inputs, config: Config) -> None:
    """Run a forward and a backward; an exchange gets a new probe expert.

    No reference to an argument, result or gradient of a token is kept.
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
    """The C struct `mallinfo2` of glibc, see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use(device: torch.device) -> int | None:
    """Return how many bytes are allocated in this process, after garbage collection.

    On a GPU, the bytes allocated by torch's allocator. On a CPU, all bytes allocated by malloc: by tensors, for each of
    which torch's CPU allocator calls it, by NumPy, by libraries in C++, and by Python objects of more than 512 bytes;
    smaller objects are not counted. None if the C library does not count them (only glibc 2.33 and later does).
    """
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    libc = _libc()
    if libc is None:
        return None
    usage = libc.mallinfo2()
    return int(usage.uordblks + usage.hblkhd)


@cache
def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = _MallInfo
    return libc
