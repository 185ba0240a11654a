"""The numbers of experts and slots of published models, and powers of two between them.

Source: `config.json` of each model (n_routed_experts, num_experts or num_local_experts; num_experts_per_tok).
"""

from __future__ import annotations

from collections.abc import Mapping

MODELS: Mapping[str, tuple[int, int]] = {  # E, K
    "mixtral-8x7b": (8, 2),
    "llama-4-scout": (16, 1),
    "gpt-oss-20b": (32, 4),
    "qwen1.5-moe": (60, 4),
    "deepseek-v2-lite": (64, 6),
    "olmoe": (64, 8),
    "gpt-oss-120b": (128, 4),
    "llama-4-maverick": (128, 1),
    "qwen3": (128, 8),
    "deepseek-v2": (160, 6),
    "glm-4.5": (160, 8),
    "deepseek-v3": (256, 8),
    "qwen3-next": (512, 10),
}
BETWEEN = ((16, 3), (32, 5), (256, 3), (512, 5))  # powers of two, with K of no model above

SIZES = (*MODELS.values(), *BETWEEN)
MANY = MODELS["deepseek-v3"]


def groups_of(experts: int, top_k: int) -> tuple[int, int]:
    """Return the number of expert groups, and how many are selected: 2 if K is even and larger than 2, else 1.

    With as many selected groups as slots, groups that are scored by their best expert would exclude no expert.

    >>> groups_of(256, 8), groups_of(60, 4), groups_of(8, 2), groups_of(16, 1)
    ((8, 2), (4, 2), (4, 1), (4, 1))
    """
    return 8 if experts >= 64 else 4, 2 if top_k > 2 and top_k % 2 == 0 else 1
