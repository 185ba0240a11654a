"""Routers of the sizes of published models, with scores, biases, normalisation, groups and dtypes in every pair.

The quick profile has each size once, with combinations in which every two other options meet; the full one has
combinations in which every option meets every size as well.
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
    """Return whether groups may change a choice: the best expert alone always lies in the group of the best expert."""
    return row["size"][1] > 1 or row["group_score"] in (None, "top2_sum")


def _quick() -> dict[str, dict[str, Any]]:
    """Return routers in which every two options meet, of each size once: sizes that are left get the first options."""
    rows, sizes = pairwise(_OPTIONS), [*SIZES]
    made = []
    for row in rows:
        size = next((size for size in sizes or SIZES if _decides({"size": size, **row})), MANY)
        sizes = [each for each in sizes if each != size]
        made.append(_named(size, row))
    return dict([*made, *(_named(size, rows[0]) for size in sizes)])


def _full() -> dict[str, dict[str, Any]]:
    return dict(_named(row["size"], row) for row in pairwise({"size": SIZES, **_OPTIONS}, _decides))


QUICK = _quick()  # the options of each router, by its name
FULL = {name: options for name, options in _full().items() if name not in QUICK}
