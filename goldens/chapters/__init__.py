"""What the goldens hold, a chapter of the law a file: inputs, worked out with reference/, never with a backend."""

from __future__ import annotations

from collections.abc import Mapping

from goldens.chapter import Chapter
from goldens.chapters import (
    balance_bias,
    capacity,
    checkpoint_rules,
    checkpoints,
    exchange,
    expert_forms,
    experts,
    fast_paths,
    forcing,
    groups,
    losses,
    overload,
    packed_rows,
    packing,
    permute,
    routing,
    scatter,
    shared_experts,
)


def chapters() -> Mapping[str, Chapter]:
    """Return all chapters by name."""
    return {
        "balance_bias": balance_bias.CHAPTER,
        "capacity": capacity.CHAPTER,
        "checkpoint_rules": checkpoint_rules.CHAPTER,
        "checkpoints": checkpoints.CHAPTER,
        "exchange": exchange.CHAPTER,
        "expert_forms": expert_forms.CHAPTER,
        "experts": experts.CHAPTER,
        "fast_paths": fast_paths.CHAPTER,
        "forcing": forcing.CHAPTER,
        "groups": groups.CHAPTER,
        "losses": losses.CHAPTER,
        "overload": overload.CHAPTER,
        "packed_rows": packed_rows.CHAPTER,
        "packing": packing.CHAPTER,
        "permute": permute.CHAPTER,
        "routing": routing.CHAPTER,
        "scatter": scatter.CHAPTER,
        "shared_experts": shared_experts.CHAPTER,
    }
