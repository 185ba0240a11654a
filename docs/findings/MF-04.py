"""MF-04: whether DeepEP gets an RDMA buffer is decided by the size of the group and the devices of the process.

Two ranks on two hosts of eight devices; and four ranks of one host, each of which sees its own device alone. The kernel
is a stand-in. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe import fused_a2a

from moe_conformance.stand_ins.deep_ep import Config
from moe_conformance.stand_ins.presenting import loaded_with, module

asked = []


class Sizes(Config):
    """The tuning of a kernel, which notes whether it is asked for the size of an RDMA buffer."""

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Note it."""
        asked.append(num_ranks)
        return super().get_rdma_buffer_size_hint(hidden_bytes, num_ranks)


class Buffer:
    """A buffer that is not allocated."""

    def __init__(self, group: object, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        """Keep what it is asked for."""
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: Sizes(20))


def remote(ranks: int, devices: int) -> str:
    """Whether the library asks for an RDMA buffer of a group."""
    torch.cuda.device_count = lambda: devices
    asked.clear()
    fused._buffer = None
    fused.get_buffer(SimpleNamespace(size=lambda: ranks), 64)
    return "RDMA" if asked else "no RDMA"


fused = loaded_with(
    fused_a2a,
    {
        "deep_ep": module("deep_ep", Buffer=Buffer, EventHandle=None, EventOverlap=None),
        "deep_ep.utils": module("deep_ep.utils", EventHandle=None, EventOverlap=None),
    },
)
if remote(2, 8) == "RDMA":
    print("not there: this Megatron-Core asks for an RDMA buffer always, and DeepEP decides")
    sys.exit(77)
observed = [remote(2, 8), remote(4, 1)]
print(f"observed: {observed[0]} between two hosts, {observed[1]} within one")
print("expected: RDMA between two hosts, no RDMA within one")
sys.exit(int(observed != ["RDMA", "no RDMA"]))
