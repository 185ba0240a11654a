"""What differs between the supported versions of Megatron-Core: 0.16 to 0.20, and the branch `dev`.

Each answer is found by looking at the library that was imported, never by its version: `dev` and releases of the same
number differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from moe_conformance.backends.megatron_core import library


def moe_layer(config: Any, number: int) -> Any:
    """Build the MoE layer of a TransformerConfig from the library's own spec."""
    parts = library.get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    if hasattr(parts, "submodules"):  # a ModuleSpec
        return library.MoELayer(config, parts.submodules, layer_number=number)
    return parts(config=config, layer_number=number)  # since then a functools.partial of MoELayer


def has_field(name: str) -> bool:
    """Whether TransformerConfig has a field of that name."""
    return name in {field.name for field in fields(library.TransformerConfig)}


def has_score(name: str) -> bool:
    """Whether a router has scores of that name, which the type of the field lists; 0.16 has a softmax and a sigmoid."""
    types = {field.name: str(field.type) for field in fields(library.TransformerConfig)}
    return repr(name) in types["moe_router_score_function"]


# The parts of a layer that are captured in a graph; the old name is still there where the new one is, and deprecated.
CAPTURED = "cuda_graph_modules" if has_field("cuda_graph_modules") else "cuda_graph_scope"


def recomputed_under_overlap() -> list[tuple[str, Any]]:
    """Return the fields that have experts computed again in the backward of an overlapped step.

    The branch dev computes whole layers again, its experts with them. The others have the MoE layer alone, and refuse
    it under overlap; 0.16 takes it and computes nothing again.
    """
    if hasattr(library.model_chunk_schedule_plan, "RecomputeSegment"):
        return [("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1)]
    return [("recompute_granularity", "selective"), ("recompute_modules", ["moe"])]


def share_of_packed() -> Callable[..., Any] | None:
    """Return the function that takes a rank's part of a packed batch, for cp as a number; 0.19 and main have none."""
    function: Callable[..., Any] | None = getattr(library.utils, "get_thd_batch_on_this_cp_rank", None)
    return function


def permutes_to_fixed_rows() -> bool:
    """Whether `permute` returns as many rows as its caller asks for, and not as many as the map has entries.

    Where it does, the all-to-all dispatcher asks for T K rows of a dropless layer, and takes maps with fewer
    entries only where its config has a capacity factor.
    """
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    return len(library.moe_utils.permute(torch.zeros(1, 1), nothing, num_out_tokens=1)[0]) == 1


def forget_kept_biases() -> None:
    """Forget the biases of forced routing that the library keeps for the process, where it has any."""
    kept = getattr(library.moe_utils, "RandomSTEShared", None)
    if kept is not None:
        kept._cache.clear()


def forget_reports() -> None:
    """Forget reported losses, their sizes and groups: those of a model that was built before."""
    if library.moe_logging is None:
        library.moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:  # that function returns a copy, and `clear` of the tracker keeps sizes and groups
        library.moe_logging.destroy_moe_metrics_tracker()
