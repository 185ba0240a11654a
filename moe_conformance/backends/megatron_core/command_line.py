"""The rules that Megatron-LM's trainer checks on its command line, and TransformerConfig does not.

They are those of deferred weight gradients that a graph captures: `validate_args` of megatron.training.arguments, which
0.16's wheel has not. A version of Transformer Engine that has the feature is stood in for, since it is not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import sys
import typing
from collections.abc import Iterator
from typing import Any

import torch

from moe_conformance.backends.megatron_core import library
from moe_conformance.contract import Settings
from moe_conformance.stand_ins.presenting import Namespace

TRANSFORMER_ENGINE = "2.12.0"  # the oldest that validate_args lets a graph hold deferred weight gradients with
_NAMES = {"attention": "attn", "router": "moe_router"}


def checks(asked: Settings) -> bool:
    """Whether the command line has a rule for the settings, and is there: a graph holds deferred weight gradients."""
    shared = asked.shared_experts > 0 and not asked.overlap_shared
    captured = asked.capture or ()
    held = "attention" in captured or ("router" in captured and shared)
    return asked.defer_weight_gradients and held and importlib.util.find_spec("megatron.training") is not None


@contextlib.contextmanager
def transformer_engine() -> Iterator[None]:
    """Have the library find a version of Transformer Engine."""
    with _replaced(library.utils, "_te_version", library.utils.PkgVersion(TRANSFORMER_ENGINE)):
        yield


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def validate(asked: Settings, hidden: int, ffn: int) -> None:
    """Let the trainer parse and validate the settings.

    Raises:
        AssertionError: it refuses them.
    """
    arguments = _arguments()
    launched = {**os.environ, "RANK": "0", "WORLD_SIZE": str(asked.ep), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    given = _replaced(sys, "argv", ["train", *_flags(asked, hidden, ffn)])
    with transformer_engine(), given, _replaced(os, "environ", launched), contextlib.redirect_stdout(io.StringIO()):
        arguments.validate_args(arguments.parse_args(), {})


def _arguments() -> Any:
    """Import the trainer's arguments; it is written for Python 3.12, of which it uses one decorator."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    arguments: Any = importlib.import_module("megatron.training.arguments")
    if not torch.cuda.is_available():  # it asks what the GPU can do: as a Hopper
        arguments.torch = Namespace(torch, cuda=Namespace(torch.cuda, get_device_capability=lambda: (9, 0)))
    return arguments


def _flags(asked: Settings, hidden: int, ffn: int) -> Iterator[str]:
    """Yield the arguments of a run; gradients are reduced in the backward, as in trainings of several replicas."""
    yield from ("--num-layers", "12", "--num-attention-heads", "1", "--hidden-size", str(hidden))
    yield from ("--ffn-hidden-size", str(ffn), "--seq-length", "8", "--max-position-embeddings", "8")
    yield from ("--micro-batch-size", "1", "--transformer-impl", "transformer_engine", "--disable-bias-linear")
    yield from ("--num-experts", str(asked.experts), "--moe-router-topk", str(asked.top_k), "--swiglu")
    yield from ("--moe-token-dispatcher-type", asked.dispatcher, "--expert-model-parallel-size", str(asked.ep))
    yield from ("--overlap-grad-reduce", "--delay-wgrad-compute", "--te-rng-tracker")
    yield from ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules")
    yield from (_NAMES.get(name, name) for name in asked.capture or ())
    if asked.dtype in (torch.bfloat16, torch.float16):
        yield "--bf16" if asked.dtype == torch.bfloat16 else "--fp16"
    if asked.overlap:
        yield "--overlap-moe-expert-parallel-comm"
    if asked.shared_experts:
        yield from ("--moe-shared-expert-intermediate-size", str(asked.shared_experts * ffn))
    if not asked.accumulate_in_product:
        yield "--no-gradient-accumulation-fusion"
    if asked.attention_bias:
        yield "--add-qkv-bias"
