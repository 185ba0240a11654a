"""Routers with the sizes of published models, and every pair of values of scores, biases, groups and dtypes.

The quick profile has each size once, with combinations that contain every pair of values of the other options; the full
profile also combines every value with every size.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_conformance.workloads.records.covering import Row, pairwise
from moe_conformance.workloads.records.model_sizes import MANY, SIZES, groups_of

_OPTIONS: dict[str, tuple[Any, ...]] = {
    "score": ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"),
    "normalise": (False, True),
    "scale": (1.0, 2.5),
    "balance_bias": (False, True),
    "group_score": (None, "top2_sum", "topk_sum", "max"),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}


def _named(size: tuple[int, int], row: Row) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a router."""
    (E, K), dtype = size, str(row["dtype"]).removeprefix("torch.")
    options = {"experts": E, "top_k": K, "dtype": row["dtype"]}
    options |= {f"routing.{name}": row[name] for name in ("score", "normalise", "scale", "balance_bias")}
    words = [f"route-top-{K}-of-{E}", row["score"].replace("_", "-")]
    words += [word for name, word in (("normalise", "normalised"), ("balance_bias", "biased")) if row[name]]
    words += ["scaled"] if row["scale"] != 1 else []
    if row["group_score"]:
        options |= {"routing.groups": groups_of(E, K), "routing.group_score": row["group_score"]}
        words.append(f"groups-{row['group_score'].replace('_', '-')}")
    return "-".join([*words, dtype]), options


def _decides(row: Row) -> bool:
    """Return whether groups can change a selection.

    With K = 1 and a group scored by its best expert they cannot: the best expert is in the best group.
    """
    return row["size"][1] > 1 or row["group_score"] in (None, "top2_sum")


def _quick() -> dict[str, dict[str, Any]]:
    """Return routers with every pair of options and each size once; sizes that are left get the first options."""
    rows, sizes = pairwise(_OPTIONS), [*SIZES]
    made = []
    for row in rows:
        size = next((size for size in sizes or SIZES if _decides({"size": size, **row})), MANY)
        sizes = [other for other in sizes if other != size]
        made.append(_named(size, row))
    return dict([*made, *(_named(size, rows[0]) for size in sizes)])


def _full() -> dict[str, dict[str, Any]]:
    return dict(_named(row["size"], row) for row in pairwise({"size": SIZES, **_OPTIONS}, _decides))


QUICK = _quick()  # the options of each router, by its name
FULL = {name: options for name, options in _full().items() if name not in QUICK}
