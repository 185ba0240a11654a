"""What drawn batches may contain within the limits that a backend declares for a variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_conformance.contract import Limit
from moe_conformance.contract.topology import Layout

MOST_TOKENS = 6
_GREATEST = 4096
_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


@dataclass(frozen=True)
class Freedom:
    """What all limits of a variant together allow on a layout and a device."""

    layout: Layout
    uneven: bool
    tokens: tuple[int, ...]  # allowed values of T, ascending
    dropped: bool
    duplicates: bool
    odd_weights: bool  # zero and negative weights
    two_in_flight: bool
    dtypes: tuple[torch.dtype, ...]
    subnormal: bool  # on CPU only: kernels on GPUs are commonly compiled to flush subnormals to zero

    @property
    def zero(self) -> bool:
        """Whether a rank may have no tokens."""
        return 0 in self.tokens

    @property
    def few(self) -> bool:
        """Whether a rank may have a small number of tokens other than zero."""
        return any(0 < T <= MOST_TOKENS for T in self.tokens)

    def subnormal_in(self, dtype: torch.dtype) -> bool:
        """Return whether products in a dtype keep subnormal numbers.

        Products in bfloat16 flush them on CPUs too: VDPBF16PS and TDPBF16PS take subnormal inputs and outputs as zero,
        whatever MXCSR says (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2), and the product
        with a one-hot matrix that dispatches tokens is one of these.
        """
        return self.subnormal and dtype != torch.bfloat16

    @classmethod
    def under(cls, limits: Sequence[Limit], layout: Layout, device: str) -> Freedom:
        """Return the freedom that limits leave on a layout and a device."""

        def allows(on: str, value: Any) -> bool:
            return all(limit.allows(value) for limit in limits if limit.on == on)

        tokens = _tokens(limits, zero=allows("zero_tokens", True))
        return cls(
            layout=layout,
            uneven=allows("uneven_tokens", True) and layout.world > 1 and len(tokens) > 1,
            tokens=tokens,
            dropped=allows("dropped_slots", True),
            duplicates=allows("duplicate_experts", True),
            odd_weights=allows("zero_weights", True) and allows("negative_weights", True),
            two_in_flight=allows("in_flight", 2),
            dtypes=tuple(dtype for dtype in _DTYPES if allows("dtype", dtype)),
            subnormal=device == "cpu",
        )


def _tokens(limits: Sequence[Limit], *, zero: bool) -> tuple[int, ...]:
    """Return the allowed numbers of tokens up to `MOST_TOKENS`, or up to the least one if that is larger.

    Raises:
        ValueError: no number from 1 to 4096 is allowed.
    """

    def allowed(T: int) -> bool:
        return all(limit.allows((T,)) for limit in limits if limit.on == "tokens")

    least = next(filter(allowed, range(1, _GREATEST + 1)), None)
    if least is None:
        raise ValueError(f"the limits on tokens allow no number of tokens from 1 to {_GREATEST}")
    numbers = range(0 if zero else 1, max(least, MOST_TOKENS) + 1)
    return tuple(filter(allowed, numbers))
