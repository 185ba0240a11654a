"""Megatron-Core itself, imported in one place. Importing this module takes seconds: the ranks preload it."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of every optional package that is missing
    from megatron.core import activations, parallel_state, utils
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import fine_grained_callables
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec, get_moe_module_spec_for_backend
    from megatron.core.models.multimodal.context_parallel import get_packed_seq_params, get_padding
    from megatron.core.optimizer import (
        OptimizerConfig,
        clip_grads,
        distrib_optimizer,
        get_megatron_optimizer,
        optimizer,
    )
    from megatron.core.pipeline_parallel import combined_1f1b, schedules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings, random
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts, moe_utils, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    try:
        from megatron.core.transformer.moe import moe_logging
    except ImportError:  # in 0.16 its functions are in moe_utils
        moe_logging = None

    from megatron.core.models.common import model_chunk_schedule_plan

    for _name in ("fine_grained_callables", "utils"):  # else imported after the shims
        if importlib.util.find_spec(f"megatron.core.models.common.{_name}") is not None:
            importlib.import_module(f"megatron.core.models.common.{_name}")

from moe_conformance.backends.megatron_core import shims

__all__ = [
    "SHIMS",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "IdentityOp",
    "LocalSpecProvider",
    "MLPSubmodules",
    "MoELayer",
    "ModuleSpec",
    "OptimizerConfig",
    "RouterReplay",
    "RouterReplayAction",
    "RowParallelLinear",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "activations",
    "combined_1f1b",
    "experts",
    "finalize_model_grads",
    "fine_grained_callables",
    "get_bias_dropout_add",
    "get_megatron_optimizer",
    "get_mlp_module_spec_for_backend",
    "get_moe_module_spec",
    "get_moe_module_spec_for_backend",
    "get_packed_seq_params",
    "get_padding",
    "model_chunk_schedule_plan",
    "moe_logging",
    "moe_utils",
    "parallel_state",
    "quiet",
    "random",
    "schedules",
    "token_dispatcher",
    "utils",
]


def quiet() -> warnings.catch_warnings[None]:
    """Ignore advice on training and warnings of old names, until the caller exits the returned context."""
    context = warnings.catch_warnings()
    context.__enter__()
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning)
    return context


SHIMS = () if torch.cuda.is_available() else shims.apply(token_dispatcher, moe_utils, moe_logging, mappings, random)
if SHIMS:
    SHIMS += shims.apply_to_training(clip_grads, distrib_optimizer, schedules, optimizer, utils)
"""What stands in for CUDA and NCCL in this process, in words; every surface reports it."""
