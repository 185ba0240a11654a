"""What a batch may do within the limits that a backend declares for a variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_conformance.contract import Limit
from moe_conformance.topology import Layout

_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


@dataclass(frozen=True)
class Freedom:
    """What all limits together allow on a layout and a device."""

    layout: Layout
    uneven: bool
    zero: bool  # ranks without tokens
    dropped: bool
    duplicates: bool
    odd_weights: bool  # some zero, some negative
    two_in_flight: bool
    dtypes: tuple[torch.dtype, ...]
    subnormal: bool  # on CPU only: kernels on GPUs are commonly compiled to flush subnormals to zero

    def subnormal_in(self, dtype: torch.dtype) -> bool:
        """Whether products in a dtype keep subnormal numbers.

        Products in bfloat16 flush them on CPUs too: VDPBF16PS and TDPBF16PS take subnormal inputs and outputs as zero,
        whatever MXCSR says (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2), and the product
        with a one-hot matrix that dispatches tokens is one of these.
        """
        return self.subnormal and dtype != torch.bfloat16

    @classmethod
    def under(cls, limits: Sequence[Limit], layout: Layout, device: str) -> Freedom:
        """Read the limits."""

        def allows(on: str, value: Any) -> bool:
            return all(value in limit.allowed for limit in limits if limit.on == on)

        return cls(
            layout=layout,
            uneven=allows("uneven_tokens", True) and layout.world > 1,
            zero=allows("zero_tokens", True),
            dropped=allows("dropped_slots", True),
            duplicates=allows("duplicate_experts", True),
            odd_weights=allows("zero_weights", True) and allows("negative_weights", True),
            two_in_flight=allows("in_flight", 2),
            dtypes=tuple(dtype for dtype in _DTYPES if allows("dtype", dtype)),
            subnormal=device == "cpu",
        )
