"""MC-94: with recomputation both forwards are counted, and one of them stays on the timeline for ever.

A microbatch with factor 1 that is recomputed, then one with factor 3 that is not. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.checkpoint import checkpoint

try:
    from megatron.core.transformer.moe.moe_logging import get_moe_overload_factor_tracker
    from megatron.core.transformer.moe.moe_utils import record_dispatch_token_counts
except ImportError:  # the branch dev has it
    print("not there: this Megatron-Core has no tracker of overload factors")
    sys.exit(77)


class Writer:
    """Keeps what a TensorBoard writer is given."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Keep a value, rounded."""
        self.values[name.removeprefix("moe/")] = round(value, 3)


def rows(x: torch.Tensor, received: float) -> torch.Tensor:
    """Pass rows through the hook of MoELayer, of which the rank receives so many and 8 under balance."""
    return record_dispatch_token_counts(x, torch.tensor([received]), torch.tensor(8.0), 1)


x, writer = torch.ones(8, 2, requires_grad=True), Writer()
checkpoint(rows, x, 8.0, use_reentrant=True).sum().backward()  # runs forwards as the library's own checkpoint does
rows(x, 24.0).sum().backward()
get_moe_overload_factor_tracker().report(iteration=1, writer=writer)
average, cumulative = writer.values["avg_overload_factor"], writer.values["max_cum_overload_factor"]
print(f"observed: the average factor is {average:.2f}, the cumulative factor {cumulative:.2f}")
print("expected: the average factor is 2.00, the cumulative factor 3.00")
sys.exit(int((average, cumulative) != (2.0, 3.0)))
