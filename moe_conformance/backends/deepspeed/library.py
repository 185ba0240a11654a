"""DeepSpeed itself, imported in one place. Importing this module takes seconds: the ranks preload it."""

from __future__ import annotations

import importlib
import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it prints that it looked for other accelerators

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of every optional package that is missing
    import deepspeed
    from deepspeed import comm
    from deepspeed.module_inject import auto_ep_layer
    from deepspeed.moe import sharded_moe
    from deepspeed.moe.ep_kernels import TOKEN_GROUP_ALIGN_SIZE_M
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    try:
        from deepspeed.module_inject import auto_ep_comm
    except ImportError:  # 0.19.6 has no other transport
        auto_ep_comm = None

__all__ = [
    "SHIMS",
    "TOKEN_GROUP_ALIGN_SIZE_M",
    "MoE",
    "TokenChoiceTopKRouter",
    "auto_ep_comm",
    "auto_ep_layer",
    "comm",
    "forget_groups",
    "groups",
    "initialize",
    "quiet",
    "sharded_moe",
]

initialize = deepspeed.initialize


def _clear_records() -> None:
    """Clear what the making of expert groups records."""
    for records in (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
        groups._ALL_TO_ALL_GROUP,
    ):
        records.clear()
    groups._WORLD_GROUP = groups.mpu = None


# 0.19.6 and what is older leave it to the caller to clear the records of groups that were destroyed.
forget_groups = getattr(groups, "_release_process_group_references", _clear_records)


def quiet() -> warnings.catch_warnings[None]:
    """Ignore torch's warnings of old names of collectives, until the caller exits the returned context."""
    context = warnings.catch_warnings()
    context.__enter__()
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning)
    return context


def _flat_all_gather(buffer: torch.Tensor, local_rows: torch.Tensor, group: Any) -> None:
    comm.all_gather_into_tensor(buffer, local_rows.flatten(), group=group)


def _apply_shims() -> tuple[str, ...]:
    # Its backend for CPUs compiles an all-reduce for inference in C++ when it is made, and a process that is ended
    # meanwhile leaves a lock for which all later ones wait. Nothing of training calls it.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    # gloo gathers into a flat buffer what is flat, NCCL anything.
    mappings: Any = importlib.import_module("deepspeed.moe.mappings")
    mappings.deepspeed = SimpleNamespace(
        utils=deepspeed.utils, comm=SimpleNamespace(all_gather_into_tensor=_flat_all_gather)
    )
    return ("no all-reduce in shared memory", "flat all_gather_into_tensor")


SHIMS = "none" if torch.cuda.is_available() else "; ".join(_apply_shims())
"""What stands in for a GPU in this process, in words; surfaces report it."""
