"""CO-04: the block of DeepSeek-V3 raises on a rank without tokens. Exits 1 while the finding is there."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
        return torch.zeros(x.shape[1], 1, dtype=torch.long), torch.ones(x.shape[1], 1)


class Block(nn.Module):
    """As that of the model."""

    def __init__(self) -> None:
        """Have two experts."""
        super().__init__()
        self.gate, self.experts = Gate(), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.config = SimpleNamespace(n_routed_experts=2, n_shared_experts=None)


def run(rank: int, store: str, answers: Any) -> None:
    """Answer with what a call of the block makes of two tokens on rank 0 and none on rank 1."""
    sys.meta_path.insert(0, Finder())
    warnings.simplefilter("ignore")
    from colossalai.shardformer.modeling.deepseek_v3 import EpDeepseekV3MoE

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    block = EpDeepseekV3MoE.from_native_module(Block(), moe_dp_group=alone, ep_group=dist.group.WORLD)
    try:
        block(torch.randn(1, 2 - 2 * rank, 4))
        answers.put((rank, "returns"))
    except RuntimeError as error:
        answers.put((rank, f"raises: {error}"))
    dist.barrier()


if __name__ == "__main__":
    answers = multiprocessing.get_context("fork").SimpleQueue()
    mp.start_processes(run, (tempfile.mktemp(), answers), nprocs=2, start_method="fork")
    found = dict(answers.get() for _ in range(2))
    print(f"observed: with two tokens the block {found[0]}; with none it {found[1]}")
    print("expected: with two tokens the block returns; with none it returns")
    sys.exit(int(set(found.values()) != {"returns"}))
