"""MC-96: values of layers are numbered by their order among the recorded layers. Exits 1 while the finding is there."""

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


tracker, writer = MoEOverloadFactorTracker(), Writer()
for number in (4, 5):  # counted from 1: a stage with the layers 3 and 4, or a model whose first layers are dense
    tracker.record_fwd(number, torch.tensor(8.0), torch.tensor(8.0))
tracker.report(iteration=1, writer=writer, per_layer_logging=True)
names = sorted(name for name in writer.values if name.startswith("avg_overload_factor_layer"))
print("observed: the layers 3 and 4 are reported as", " and ".join(names))
print("expected: the layers 3 and 4 are reported as avg_overload_factor_layer_3 and avg_overload_factor_layer_4")
sys.exit(int(names != ["avg_overload_factor_layer_3", "avg_overload_factor_layer_4"]))
