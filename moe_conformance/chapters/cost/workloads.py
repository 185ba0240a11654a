"""Runs of an exchange with other sizes, with which the cost of a step is compared."""

from __future__ import annotations

from dataclasses import replace

from moe_conformance.workloads.recipes import PROBE, exchange_workload
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.twins import Twin, twin


def more_experts(workload: Workload) -> list[Twin]:
    """Return a run with the same number of tokens, twice the experts and twice the slots; a backend may refuse it.

    The suite's expert needs a column of the hidden size for each expert.
    """
    config = workload.config
    E, K, D = 2 * config.experts, min(2 * config.top_k, 2 * config.experts), config.hidden
    sizes = {"experts": E, "top_k": K, "hidden": D if E <= D else 2 * D}
    drawn = [
        replace(recipe, config={**recipe.config, **sizes}, experts_per_ep=None)
        for recipe in PROBE
        if recipe.name == workload.name
    ]
    how = f"with {sizes['experts']} experts and {sizes['top_k']} slots"
    others = [exchange_workload(larger, ExchangeStep(), config.variant, workload.layout) for larger in drawn]
    return [replace(twin(workload, how), workload=other, anew=True) for other in others]
