"""MC-95: a forward that no backward follows stays on the timeline for ever.

Steps of one layer whose tokens ask for no gradient, as those of the first MoE layer over frozen ones, and of one whose
tokens do. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch

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


def rows(received: float, layer: int, asks: bool) -> None:
    """Pass rows through the hook of MoELayer, of which the rank receives so many and 8 under balance; then back."""
    y = record_dispatch_token_counts(
        torch.ones(8, 2, requires_grad=asks), torch.tensor([received]), torch.tensor(8.0), layer
    )
    if y.requires_grad:
        y.sum().backward()


writer = Writer()
for _ in range(10):
    rows(8.0, 1, asks=False)
    rows(24.0, 2, asks=True)
get_moe_overload_factor_tracker().report(iteration=1, writer=writer)
cumulative = writer.values["max_cum_overload_factor"]
print(f"observed: the cumulative factor of ten microbatches, one at a time, is {cumulative:.2f}")
print("expected: the cumulative factor of ten microbatches, one at a time, is 3.00")
sys.exit(int(cumulative != 3.0))
