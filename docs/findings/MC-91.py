"""MC-91: layers with different numbers of entries raise, or get the entries of other layers.

One rank, two layers: of 3 and 2 entries, and of 4 and 2, with factors 1 and 3. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys

import torch

try:
    from megatron.core.transformer.moe.moe_logging import MoEOverloadFactorTracker
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


def layers(entries: tuple[int, int]) -> str:
    """Report on entries of factor 1 in layer 1 and of factor 3 in layer 2; return the averages of both."""
    tracker, writer = MoEOverloadFactorTracker(), Writer()
    for layer, factor in ((1, 1.0), (2, 3.0)):
        for _ in range(entries[layer - 1]):
            tracker.record_fwd(layer, torch.tensor(8 * factor), torch.tensor(8.0))
    try:
        tracker.report(iteration=1, writer=writer, per_layer_logging=True)
    except ValueError as error:
        return f"ValueError: {error}"
    return " and ".join(
        str(value) for name, value in writer.values.items() if name.startswith("avg") and "layer" in name
    )


odd, even = layers((3, 2)), layers((4, 2))
print("observed: averages of layers of 3 and 2 entries:", odd)
print("observed: averages of layers of 4 and 2 entries:", even)
print("expected: averages of layers of 3 and 2 entries: 1.0 and 3.0")
print("expected: averages of layers of 4 and 2 entries: 1.0 and 3.0")
sys.exit(int((odd, even) != ("1.0 and 3.0",) * 2))
