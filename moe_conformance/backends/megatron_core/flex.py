"""Megatron-Core's flex dispatcher, over stand-ins for the kernels that it calls.

A backend of its own, so that what it says is not counted among verdicts that need no stand-in. What does not depend on
the dispatcher (routers, losses, packing, settings) is judged of the backend megatron-core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch

from moe_conformance.backends.megatron_core.backend import MegatronCore
from moe_conformance.contract import Limit, Session, Topology, Unsupported

DEEPEP, DEEPEP_V2, HYBRIDEP, NCCLEP = "deepep", "deepep-v2", "hybridep", "nccl-ep"
CHUNK = 64  # tokens
PADS = ("moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens")  # by version

_TOP = "its manager takes the largest K weights of the dense map: weights that are zero or negative lose to empty ones"
_EMPTY = "its manager sends K rows of every token: it has no mask for slots that are empty"
_KERNEL_FLOAT32 = "weights are sent as float32, which is all that the kernels take"
_EQUAL = "HybridEP takes equally many tokens from all ranks, and this version does not pad them"
_MAXIMUM = "its manager gives the kernel the tokens of its own rank as the maximum, which must be one for all: MF-05"
_BOUND = "the first batch of a rank, in chunks of 64, bounds its tokens for the process: MF-06"


class MegatronFlex(MegatronCore):
    """`moe_token_dispatcher_type="flex"`, a variant for each manager."""

    name: ClassVar[str] = "megatron-core-flex"
    variants: ClassVar[tuple[str, ...]] = (DEEPEP, HYBRIDEP, NCCLEP, DEEPEP_V2)

    # Both are over the interfaces of others: the maps of one, and the wrappers that all of them share.
    sampled: ClassVar[tuple[str, ...]] = (NCCLEP, DEEPEP_V2)

    def limits(self, variant: str) -> Sequence[Limit]:
        """What the managers exclude, and the dispatcher."""
        dtypes = Limit("dtype", (torch.float32, torch.bfloat16, torch.float16), _KERNEL_FLOAT32, proof="undefined")
        positive = [Limit(name, (False,), _TOP, proof="undefined") for name in ("zero_weights", "negative_weights")]
        of_variant = {
            DEEPEP: positive,
            DEEPEP_V2: [*positive, Limit("uneven_tokens", (False,), _MAXIMUM, proof="undefined")],
            HYBRIDEP: [] if self._pads() else [Limit("uneven_tokens", (False,), _EQUAL, proof="undefined")],
            NCCLEP: [
                *positive,
                Limit("dropped_slots", (False,), _EMPTY, proof="undefined"),
                Limit("tokens", range(1, CHUNK + 1), _BOUND, proof="undefined"),
            ],
        }
        return (*super().limits(variant), dtypes, *of_variant[variant])

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Import the library if the ranks did not preload it, and open a session with the stand-ins in place."""
        self.versions()
        if device.type != "cpu":
            raise Unsupported("the stand-ins are for CPU ranks")
        from moe_conformance.backends.megatron_core.flex_session import FlexSession

        return FlexSession(topology, device)

    def _pads(self) -> bool:
        """Whether the library's sources name one of the options that pad; the driver does not import it."""
        folder = self.library.folder()
        return folder is None or _names_one(str(folder / "megatron/core/transformer/transformer_config.py"))


@cache
def _names_one(path: str) -> bool:
    with open(path) as file:
        text = file.read()
    return any(f"{name}:" in text for name in PADS)
