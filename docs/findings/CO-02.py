"""CO-02: DeepSeek's block raises where its gate has no loss, as in evaluation. Exits 1 while the finding is there."""

from __future__ import annotations

import sys
import tempfile
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
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


class Gate(nn.Module):
    """As that of the model: in evaluation there is no loss."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Send every token to expert 0."""
        return torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1), torch.zeros(1) if self.training else None


class Block(nn.Module):
    """As that of the model."""

    def __init__(self) -> None:
        """Have one expert."""
        super().__init__()
        self.gate, self.experts, self.num_experts_per_tok = Gate(), nn.ModuleList([nn.Linear(4, 4)]), 1
        self.config = SimpleNamespace(n_routed_experts=1, n_shared_experts=None)


sys.meta_path.insert(0, Finder())
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)


def called(training: bool) -> str:
    """Call the block."""
    from colossalai.shardformer.modeling.deepseek import EPDeepseekMoE

    group = dist.group.WORLD
    block = EPDeepseekMoE.from_native_module(Block(), tp_group=group, moe_dp_group=group, ep_group=group)
    try:
        block.train(training)(torch.randn(1, 2, 4))
    except AttributeError as error:
        return f"raises: {error}"
    return "returns"


found = called(training=True), called(training=False)
print(f"observed: in training the block {found[0]}, in evaluation it {found[1]}")
print("expected: in training the block returns, in evaluation it returns")
sys.exit(int(found != ("returns", "returns")))
