"""Read the settings of a process that a library should not change, as strings by name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_conformance.engine.leftovers import TORCH_VARIABLES

_FLAGS: dict[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the grad mode": torch.is_grad_enabled,
    "the inference mode": torch.is_inference_mode_enabled,
    "the anomaly mode": torch.is_anomaly_enabled,
    "the autocast of the CPU": lambda: torch.is_autocast_enabled("cpu"),
    "the autocast of CUDA": lambda: torch.is_autocast_enabled("cuda"),
    "the deterministic flag": torch.are_deterministic_algorithms_enabled,
    "the flag to warn of nondeterminism only": torch.is_deterministic_algorithms_warn_only_enabled,
    "the flag to fill uninitialised memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    "the precision of float32 products": torch.get_float32_matmul_precision,
    "TF32 in products": lambda: torch.backends.cuda.matmul.allow_tf32,
    "float16 sums in products": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "bfloat16 sums in products": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "TF32 in cuDNN": lambda: torch.backends.cudnn.allow_tf32,
    "cuDNN": lambda: torch.backends.cudnn.enabled,
    "cuDNN's benchmarks": lambda: torch.backends.cudnn.benchmark,
    "cuDNN's deterministic flag": lambda: torch.backends.cudnn.deterministic,
    "the number of threads": torch.get_num_threads,
    "the number of threads between operations": torch.get_num_interop_threads,
}

# Where torch.backends has `fp32_precision`, since 2.9: some of them are under none of the flags above.
_PRECISIONS = (
    *("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn"),
    *("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
)


def settings() -> dict[str, str]:
    """Return every setting and environment variable by name; warning filters are one per line.

    Variables that torch itself sets are left out: it sets them when a library uses a functional collective.
    """
    found = {name: _value_of(flag) for name, flag in _FLAGS.items()}
    found |= {f"the float32 precision of torch.backends.{at}".rstrip("."): _precision(at) for at in _PRECISIONS}
    found["the default process group"] = _default_group()
    found["the warning filters"] = "\n".join(map(str, warnings.filters))
    return found | {
        f"the environment variable {name}": value for name, value in os.environ.items() if name not in TORCH_VARIABLES
    }


def _value_of(flag: Callable[[], Any]) -> str:
    """Return the value of a flag; torch raises RuntimeError for a flag that combines several which differ."""
    try:
        return str(flag())
    except RuntimeError:
        return "of two minds"


def _precision(at: str) -> str:
    """Return the float32 precision of a part of torch.backends; "None" if this torch has no such part."""
    part: Any = torch.backends
    for name in filter(None, at.split(".")):
        part = getattr(part, name, None)
    return str(getattr(part, "fp32_precision", None))


def _default_group() -> str:
    if not dist.is_available() or not dist.is_initialized():
        return "none"
    return f"{dist.get_world_size()} ranks, object {id(dist.group.WORLD)}"
