"""Colossal-AI itself, imported in one place. Importing this module takes seconds: the ranks preload it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

__all__ = ["SHIMS", "DeepseekGate", "blocks", "zero"]

# What the package imports, and what MoE blocks do not call: optimizers, attention, whole models of one version.
_ABSENT = ("bitsandbytes", "galore_torch", "peft", "transformers")


class _Absent(ModuleType):
    """A module of which every name is there: a class, or a function that returns None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[:1].isupper() else lambda *_: None


class _AbsentFinder:
    """Finds the packages that are left out, while Colossal-AI is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _ABSENT else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


def _imported() -> tuple[dict[str, Any], Any, Any]:
    there = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _ABSENT}
    finder: Any = _AbsentFinder()
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it uses old names of torch
            from colossalai.shardformer.modeling import deepseek, deepseek_v3, mixtral
            from colossalai.zero.low_level import low_level_optim
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Absent)]:
            del sys.modules[name]
        sys.modules.update(there)
    found = {
        "deepseek": deepseek.EPDeepseekMoE,
        "deepseek-v3": deepseek_v3.EpDeepseekV3MoE,
        "mixtral": mixtral.EPMixtralSparseMoeBlock,
    }
    return found, deepseek.DeepseekMoEGate_Col, low_level_optim


blocks, DeepseekGate, zero = _imported()
SHIMS = "none"
if not torch.cuda.is_available():
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    # Its accelerator of CPUs refuses what a CPU need not do, or has in torch itself: streams of the ZeRO optimizer,
    # which also asserts that there is a GPU, and random states of parallel linear layers.
    CpuAccelerator.Stream = CpuAccelerator.current_stream = lambda _: None
    CpuAccelerator.stream = lambda _, stream: nullcontext(stream)
    CpuAccelerator.get_current_device = lambda _: torch.device("cpu")
    CpuAccelerator.device_count = lambda _: 1
    CpuAccelerator.get_rng_state = lambda _, device=None: torch.get_rng_state()
    CpuAccelerator.manual_seed = lambda _, seed: torch.manual_seed(seed)
    zero.LowLevelZeroOptimizer._sanity_checks = lambda _: None
    SHIMS = "streams, devices and seeds of its accelerator"
