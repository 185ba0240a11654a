"""CO-05: DeepSeek's gate raises for its loss over a batch, seq_aux=False. Exits 1 while the finding is there."""

from __future__ import annotations

import sys
import tempfile
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


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


def called(sequences: bool) -> str:
    """Route in training."""
    from colossalai.shardformer.modeling.deepseek import DeepseekMoEGate_Col

    native: Any = nn.Linear(4, 4, bias=False)
    of_model = {"scoring_func": "softmax", "top_k": 2, "norm_topk_prob": True, "alpha": 0.001, "n_routed_experts": 4}
    for name, value in (of_model | {"seq_aux": sequences}).items():
        setattr(native, name, value)
    gate = DeepseekMoEGate_Col.from_native_module(native, dist.group.WORLD, None, True, False)
    try:
        gate(torch.randn(1, 2, 4))
    except AttributeError as error:
        return f"raises: {error}"
    return "returns"


found = called(sequences=True), called(sequences=False)
print(f"observed: with the loss of sequences the gate {found[0]}, with that of a batch it {found[1]}")
print("expected: with the loss of sequences the gate returns, with that of a batch it returns")
sys.exit(int(found != ("returns", "returns")))
