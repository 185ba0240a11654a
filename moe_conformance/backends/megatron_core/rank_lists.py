"""The library's rank lists for sizes and an order of axes, behind the library's own checks of them."""

from __future__ import annotations

from collections.abc import Mapping
from unittest.mock import patch

from torch.distributed import ProcessGroup

from moe_conformance.backends.megatron_core.library import parallel_state
from moe_conformance.contract import refusals

USUAL = "tp-cp-ep-dp-pp"  # the default of initialize_model_parallel


class _Begins(Exception):
    """The library has checked everything and makes its first group."""


def rank_lists(sizes: Mapping[str, int], order: str) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the lists of the two rank generators, for the dense and the expert parts of a model.

    Raises:
        Unsupported: by the library, which `initialize_model_parallel` does before it makes a group.
    """
    with refusals(RuntimeError, AssertionError, match="not divisible|must be the same|expected to be the same"):
        _check(sizes, order)
    common = {"pp": sizes["pp"], "order": order}
    world, tp, cp, ep, etp = (sizes[name] for name in ("world", "tp", "cp", "ep", "etp"))
    dense = parallel_state.RankGenerator(tp=tp, ep=1, cp=cp, dp=world // (tp * cp * sizes["pp"]), **common)
    expert = parallel_state.RankGenerator(tp=etp, ep=ep, cp=1, dp=world // (etp * ep * sizes["pp"]), **common)
    lists = {
        "tp": dense.get_ranks("tp"),
        "cp": dense.get_ranks("cp"),
        "pp": dense.get_ranks("pp"),
        "dp": dense.get_ranks("dp"),
        "dp_cp": dense.get_ranks("dp-cp"),
        "ep": expert.get_ranks("ep"),
        "etp": expert.get_ranks("tp"),
        "ep_etp": expert.get_ranks("tp-ep"),
        "edp": expert.get_ranks("dp"),
        "expert_pp": expert.get_ranks("pp"),
    }
    return {"world": (tuple(range(world)),)} | {
        name: tuple(tuple(ranks) for ranks in groups) for name, groups in lists.items()
    }


def _check(sizes: Mapping[str, int], order: str) -> None:
    """Run `initialize_model_parallel` up to its first group, for a world that is not there.

    The groups of a session that is open on this rank are out of its sight meanwhile.
    """
    distributed = parallel_state.torch.distributed
    groups = {name: None for name, value in vars(parallel_state).items() if isinstance(value, ProcessGroup)}
    with (
        patch.dict(vars(parallel_state), groups),
        patch.object(distributed, "is_initialized", lambda: True),
        patch.object(distributed, "get_world_size", lambda group=None: sizes["world"]),
        patch.object(distributed, "get_rank", lambda group=None: 0),
        patch.object(parallel_state, "create_group", side_effect=_Begins),
    ):
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes["tp"],
                pipeline_model_parallel_size=sizes["pp"],
                context_parallel_size=sizes["cp"],
                expert_model_parallel_size=sizes["ep"],
                expert_tensor_parallel_size=sizes["etp"],
                order=order,
                create_gloo_process_groups=False,
            )
        except _Begins:
            return
    raise AssertionError("initialize_model_parallel made no group")
