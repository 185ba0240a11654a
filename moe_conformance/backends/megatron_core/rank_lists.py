"""The rank lists of the library's groups, for sizes and an order of axes that pass its checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from torch.distributed import ProcessGroup

from moe_conformance.backends.megatron_core.library import parallel_state
from moe_conformance.contract import refusals

USUAL = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel

# The suite's names, and how the library describes the group. It makes no group along pp for experts of their own.
_DESCRIBED = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "dp": "DATA_PARALLEL_GROUP",
    "dp_cp": "DATA_PARALLEL_GROUP_WITH_CP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "etp": "EXPERT_TENSOR_PARALLEL_GROUP",
    "ep_etp": "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "edp": "EXPERT_DATA_PARALLEL_GROUP",
}


def rank_lists(sizes: Mapping[str, int], order: str) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the lists of every group that `initialize_model_parallel` makes, none where it makes no such group.

    Raises:
        Unsupported: by the library, where it refuses the sizes or the order.
    """
    with refusals(RuntimeError, AssertionError, match="not divisible|must be the same|expected to be the same"):
        made = _made(sizes, order)
    lists = {name: tuple(made[described]) for name, described in _DESCRIBED.items()}
    return {"world": (tuple(range(sizes["world"])),)} | lists


def _made(sizes: Mapping[str, int], order: str) -> Mapping[str, Sequence[tuple[int, ...]]]:
    """Run `initialize_model_parallel` for a simulated world, and record its groups by description.

    What a session that is open on this rank has made is out of its sight meanwhile.
    """
    made: dict[str, list[tuple[int, ...]]] = defaultdict(list)

    def create_group(ranks: Sequence[int], *, group_desc: str, **_: Any) -> object:
        made[group_desc].append(tuple(ranks))
        return object()  # in place of the group, which is not used

    distributed = parallel_state.torch.distributed
    groups = {name: None for name, value in vars(parallel_state).items() if isinstance(value, ProcessGroup)}
    with (
        patch.dict(vars(parallel_state), {**groups, "_GLOBAL_MEMORY_BUFFER": None}),
        patch.object(distributed, "is_initialized", lambda: True),
        patch.object(distributed, "get_world_size", lambda group=None: sizes["world"]),
        patch.object(distributed, "get_rank", lambda group=None: 0),
        patch.object(parallel_state, "create_group", create_group),
    ):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=sizes["pp"],
            context_parallel_size=sizes["cp"],
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=sizes["etp"],
            order=order,
            create_gloo_process_groups=False,
        )
    return made
