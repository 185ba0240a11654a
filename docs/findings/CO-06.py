"""CO-06: the gradient of the attached loss does not follow the scale of the main loss.

Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist


class Absent(ModuleType):
    """A module of a package that is not needed: of optimizers, attention, or models of one version."""

    def __getattr__(self, name: str) -> Any:
        """Return a class, or a function that returns None."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[:1].isupper() else lambda *_: None


class Finder:
    """Finds such modules."""

    def find_spec(self, name: str, *_: Any) -> Any:
        """Return how to make the module."""
        absent = name.partition(".")[0] in ("bitsandbytes", "galore_torch", "peft", "transformers")
        return ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make it."""
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


sys.meta_path.insert(0, Finder())
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)


def gradient(scale: float) -> float:
    """Return the gradient of an attached loss of weight, where the main loss is multiplied by a scale."""
    from colossalai.shardformer.modeling.deepseek import AddAuxiliaryLoss

    weight = torch.ones(1, requires_grad=True)
    y = AddAuxiliaryLoss.apply(torch.zeros(1, requires_grad=True), weight * 1.0)
    (y.sum() * scale).backward()
    return float(weight.grad) / scale  # as a loss scaler and the average over microbatches divide


found = [gradient(each) for each in (1.0, 65536.0, 0.25)]
print(f"observed: with the scale 1, the scale 65536 of float16, and 4 microbatches the loss counts {found} times")
print(
    "expected: with the scale 1, the scale 65536 of float16, and 4 microbatches the loss counts [1.0, 1.0, 1.0] times"
)
sys.exit(int(found != [1.0, 1.0, 1.0]))
