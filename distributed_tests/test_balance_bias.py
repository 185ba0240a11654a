"""BIAS: updates of the balance bias by the loads of a step, and the bias as state."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_conformance.chapters.balance_bias.judge.balancing import (
    judge_agreement,
    judge_counters,
    judge_forced,
    judge_steady,
    judge_updates,
)
from moe_conformance.chapters.balance_bias.judge.balancing_state import (
    judge_growth,
    judge_in_place,
    judge_reload,
    judge_selection,
    judge_untrained,
)
from moe_conformance.chapters.balance_bias.judge.quantile_balancing import judge_quantiles
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ON_BALANCING_ROUTERS
from moe_conformance.workloads.records.training import RouterBatch
from moe_conformance.workloads.records.workload import Workload


def _batches(workload: Workload) -> Iterator[RouterBatch]:
    """Yield what the routers are fed on all ranks."""
    for call in workload.calls:
        for given in call.given:
            yield from given.get("batches", ())


def optimised(workload: Workload) -> bool:
    """Select scripts in which an optimizer takes a step, behind updates, saving and loading."""
    return any(call.method == "optimise" for call in workload.calls)


def plain(workload: Workload) -> bool:
    """Select scripts with an optimizer, and of pairs of options those that are updated by the sign of own loads."""
    return optimised(workload) or (workload.rotates and not by_quantiles(workload) and not forced(workload))


def shared(workload: Workload) -> bool:
    """Select those with routers that several ranks train."""
    return optimised(workload) and workload.layout.world > workload.layout.pp


def layered(workload: Workload) -> bool:
    """Select models with several routers, updated by the sign of the load."""
    return workload.config.balance.layers > 1 and not by_quantiles(workload)


def by_quantiles(workload: Workload) -> bool:
    """Select updates by the quantiles of scores."""
    return workload.config.balance.rule == "quantile"


def uncounted(workload: Workload) -> bool:
    """Select padding tokens and dropped slots, in updates by the sign of the load."""
    padded = any(batch.padding_T is not None for batch in _batches(workload))
    return not by_quantiles(workload) and (padded or workload.config.capacity.factor is not None)


def untrained(workload: Workload) -> bool:
    """Select forwards that do not train, or that run again, in updates by the sign of the load."""
    alone = any(batch.mode != "training" for batch in _batches(workload))
    return not by_quantiles(workload) and (workload.config.balance.recompute or alone)


def forced(workload: Workload) -> bool:
    """Select routers with forced routing."""
    return bool(workload.config.routing.forced)


def narrow(workload: Workload) -> bool:
    """Select models of half precision."""
    return workload.config.dtype in (torch.bfloat16, torch.float16)


def narrow_and_saved(workload: Workload) -> bool:
    """Whether it is one of half precision that saves and loads the biases as well."""
    return narrow(workload) and "load" in [call.method for call in workload.calls]


class TestUpdates:
    test_by_the_rate_against_the_load = Row("BIAS-01", ON_BALANCING_ROUTERS, judge_updates, when=plain)
    """An update adds the rate below the mean load and subtracts it above."""

    test_loads_of_all_ranks_of_the_router = Row("BIAS-02", ON_BALANCING_ROUTERS, judge_updates, when=shared)
    """Loads are summed over the ranks that train the router, and over no others."""

    test_the_same_bits_on_all_ranks = Row("BIAS-03", ON_BALANCING_ROUTERS, judge_agreement, when=shared)
    """All ranks that train a router hold the same bias after every update."""

    test_all_microbatches_of_a_step_once = Row(
        "BIAS-04", ON_BALANCING_ROUTERS, (judge_steady, judge_counters, judge_updates), when=optimised
    )
    """An update uses the loads since the last one, leaves zeros, and nothing changes between updates."""

    test_every_layer_by_its_own_loads = Row("BIAS-11", ON_BALANCING_ROUTERS, judge_updates, when=layered)
    """Routers with different loads are updated each by its own."""


class TestQuantiles:
    test_every_expert_would_have_had_its_share = Row(
        "BIAS-12", ON_BALANCING_ROUTERS, judge_quantiles, when=by_quantiles
    )
    """By the new bias every expert lies where the step's tokens would have selected it by its balanced share."""


class TestLoads:
    test_routed_slots_of_valid_tokens = Row(
        "BIAS-05", ON_BALANCING_ROUTERS, (judge_updates, judge_counters), when=uncounted
    )
    """Padding tokens and rows of padding to capacity are no load."""

    test_training_forwards_once = Row("BIAS-06", ON_BALANCING_ROUTERS, (judge_updates, judge_counters), when=untrained)
    """Evaluation and forwards without gradients leave no trace, and a recomputed forward counts once."""

    test_no_change_by_forced_loads = Row("BIAS-07", ON_BALANCING_ROUTERS, (judge_forced, judge_counters), when=forced)
    """While routing is forced the bias keeps its bits, unless the backend claims otherwise."""


class TestState:
    test_one_tensor = Row(
        "BIAS-08", ON_BALANCING_ROUTERS, (judge_in_place, judge_selection, judge_reload), when=optimised
    )
    """Router, state dictionary and earlier references see an update, and loading brings the bits back."""

    test_float32_in_models_of_half_precision = Row(
        "BIAS-09", ON_BALANCING_ROUTERS, (judge_growth, judge_selection, judge_reload), when=narrow_and_saved
    )
    """Small updates are kept, saved, and take part in the selection."""

    test_nothing_else_trains_it = Row("BIAS-10", ON_BALANCING_ROUTERS, judge_untrained, when=optimised)
    """It has no gradient, and the optimizer leaves it alone."""
