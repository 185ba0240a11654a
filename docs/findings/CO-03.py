"""CO-03: the block of DeepSeek-V3 raises without expert parallelism. Exits 1 while the finding is there."""

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
    """As that of the model."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send every token to expert 0."""
        return torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)


class Block(nn.Module):
    """As that of the model."""

    def __init__(self) -> None:
        """Have one expert."""
        super().__init__()
        self.gate, self.experts = Gate(), nn.ModuleList([nn.Linear(4, 4)])
        self.config = SimpleNamespace(n_routed_experts=1, n_shared_experts=None)


sys.meta_path.insert(0, Finder())
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)


def called() -> str:
    """Call the block on one rank."""
    from colossalai.shardformer.modeling.deepseek_v3 import EpDeepseekV3MoE

    block = EpDeepseekV3MoE.from_native_module(Block(), moe_dp_group=dist.group.WORLD, ep_group=dist.group.WORLD)
    try:
        block(torch.randn(1, 2, 4))
    except UnboundLocalError as error:
        return f"raises: {error}"
    return "returns"


found = called()
print("observed: on one rank the block", found)
print("expected: on one rank the block returns")
sys.exit(int(found != "returns"))
