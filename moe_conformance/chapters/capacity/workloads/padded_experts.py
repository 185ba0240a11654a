"""The pinned workloads of exchanges that pad every expert to its capacity, with the probe and the backend's experts.

All routed slots fit: those beyond the capacity have been dropped, as by a router. Without a capacity factor the
exchange chooses the capacity at which nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.reference.capacity import drops, limits
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, EP2_ETP2, TP2_EP2, Chapter
from moe_conformance.workloads.recipes import BY_TURNS, ONE_WITHOUT, UNEVEN, Recipe, exchange_workload
from moe_conformance.workloads.records.half_precision import drawn_in, in_float16
from moe_conformance.workloads.records.routes import anywhere, one_expert
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile


def fitting(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route to any K different experts, each of which keeps its first C slots."""
    return _dropped(anywhere(T, config, layout, generator), config)


def crowded(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route all tokens to one expert, which keeps its first C slots; the others have padding only."""
    return _dropped(one_expert(T, config, layout, generator), config)


def _dropped(ids_TK: Tensor, config: Config) -> Tensor:
    assert config.capacity.factor is not None
    sizes = (len(ids_TK), config.top_k, config.experts)
    room = limits.capacities(*sizes, factor=config.capacity.factor, minimum=config.capacity.minimum)[0]
    kept_TK = drops.keep(ids_TK, config.experts, capacity=room, policy="position")
    return torch.where(kept_TK, ids_TK, -1)


def _filled(factor: float, **others: Any) -> dict[str, Any]:
    return {"capacity.padded": True, "capacity.factor": factor, **others}


_LOSSLESS: dict[str, Any] = {"capacity.padded": True}

_PROBE = (
    Recipe("to-capacity-even", fitting, config=_filled(1.0)),
    Recipe("to-capacity-loose-even", fitting, config=_filled(1.5, top_k=3), tokens=(11,)),
    Recipe("to-capacity-of-all-even", fitting, config=_filled(4.0)),
    Recipe("to-capacity-beyond-even", fitting, config=_filled(6.0)),
    Recipe("to-capacity-uneven", fitting, config=_filled(1.0), tokens=UNEVEN),
    Recipe("to-capacity-one-expert-even", crowded, config=_filled(1.0, top_k=1)),
    Recipe("to-capacity-rank-without-tokens", fitting, config=_filled(1.0), tokens=ONE_WITHOUT),
    Recipe("to-capacity-minimum", fitting, config={**_filled(0.5), "capacity.minimum": 3}, tokens=ONE_WITHOUT),
    Recipe("to-capacity-in-flight", fitting, config=_filled(1.0), tokens=UNEVEN, schedule="F0 F1 B1 B0"),
    Recipe("to-capacity-weighed-at-input-even", fitting, config=_filled(1.0, weights_applied="input")),
    Recipe("to-capacity-filled-even", fitting, config=_filled(2.0), memory="filled"),
    Recipe("to-capacity-even-bfloat16", fitting, config=_filled(1.0, dtype=torch.bfloat16)),
    Recipe("to-capacity-two-dims-even", fitting, config=_filled(1.0), lead="two_dims"),
    Recipe(
        "to-capacity-halves-in-flight-uneven", fitting, config=_filled(1.0), tokens=UNEVEN, schedule="D0 D1 C0 C1 B0 B1"
    ),
    Recipe("to-capacity-inference-even", fitting, config=_filled(1.0), schedule="F0 I1 B0 N2"),
    Recipe("lossless-even", config=_LOSSLESS),
    Recipe("lossless-uneven", config=_LOSSLESS, tokens=UNEVEN),
    Recipe("lossless-top-3-uneven", config={**_LOSSLESS, "top_k": 3}, tokens=UNEVEN),
    Recipe("lossless-one-expert", one_expert, config={**_LOSSLESS, "top_k": 1}, tokens=UNEVEN),
    Recipe("lossless-minimum", config={**_LOSSLESS, "capacity.minimum": 9}, tokens=ONE_WITHOUT),
    Recipe("lossless-by-turns", config=_LOSSLESS, tokens=BY_TURNS, schedule="F0 B0 F1 B1 F2 B2"),
)

PROBE = (*_PROBE, *in_float16(_PROBE))
EXPERTS = (
    Recipe("own-to-capacity-even", fitting, config=_filled(1.0)),
    Recipe("own-to-capacity-loose-even", fitting, config=_filled(2.0)),
    Recipe("own-lossless", config=_LOSSLESS, tokens=ONE_WITHOUT),
)


def padded(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for recipe in drawn_in(profile, PROBE):
        yield exchange_workload(recipe, ExchangeStep(option="capacity padding"), variant, layout)
    for recipe in EXPERTS:
        yield exchange_workload(recipe, ExpertsStep(), variant, layout)


def names() -> tuple[str, ...]:
    """Return the names of the workloads."""
    return tuple(recipe.name for recipe in (*PROBE, *EXPERTS))


CHAPTERS = (
    Chapter(
        (ExchangeStep(option="capacity padding"), ExpertsStep()),
        names(),
        padded,
        "every",
        (EP2, EP2_ETP2, EP2_EDP2, TP2_EP2),
    ),
)
