"""Scripts that read the parameters of a router of a new model. Uninitialised memory holds NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, TP2_EP2, Chapter
from moe_conformance.workloads.records.runs import ON_INITIAL_ROUTER
from moe_conformance.workloads.records.workload import Call, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

_CONFIGS: dict[str, dict[str, Any]] = {
    "initial-router": {},
    "initial-router-biased": {"routing.score": "sigmoid", "routing.normalise": True, "routing.balance_bias": True},
    "initial-router-gate-bias-bfloat16": {
        "gate_bias": True,
        "routing.score": "softmax_topk",
        "dtype": torch.bfloat16,
    },
}
NAMES = tuple(_CONFIGS)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield a script for each config, in the quick profile most of them on one layout."""
    if layout.world > USUAL_RANKS:
        return
    for name, options in _CONFIGS.items():
        if profile == "quick" and layout != TP2_EP2 and options:
            continue
        config = Config(variant).changed(options)
        calls = (Call("read", ({},) * layout.world),)
        yield Workload(name, ON_INITIAL_ROUTER, config, layout, (), memory="filled", calls=calls)


CHAPTERS = (Chapter((ON_INITIAL_ROUTER,), NAMES, scripts, quick=(EP2, TP2_EP2)),)
