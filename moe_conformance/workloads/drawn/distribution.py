"""The features of drawn batches, and which of them every cell must have drawn at least once.

A search that never drew an idle rank shows nothing about idle ranks. So the features of all drawn batches are counted,
and every feature that a backend's limits allow is required.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.workloads.drawn.freedom import Freedom
from moe_conformance.workloads.drawn.router_strategies import LARGE
from moe_conformance.workloads.drawn.strategies import MOST_SLOTS, weighing_dtype
from moe_conformance.workloads.records.features import features, in_flight
from moe_conformance.workloads.records.runs import DrawnStep, RouterStep
from moe_conformance.workloads.records.workload import Batch, Workload


@dataclass(frozen=True)
class Feature:
    """A property that a drawn workload may have, such as an idle rank."""

    name: str
    has: Callable[[Workload], bool]
    allowed: Callable[[Freedom], bool] = lambda freedom: True
    refusable: bool = False  # it is an option, which a backend may refuse to build


def required(run: DrawnStep, freedom: Freedom) -> tuple[Feature, ...]:
    """Return the features that drawn workloads of a run must have had: those that the limits allow."""
    return tuple(feature for feature in (ROUTE if isinstance(run, RouterStep) else PROBE) if feature.allowed(freedom))


# ---- of every kind of workload --------------------------------------------------------------------------------


def _microbatches(holds: Callable[[tuple[Batch, ...]], bool]) -> Callable[[Workload], bool]:
    """Return the condition that `holds` is true of the batches of all ranks in some microbatch."""
    return lambda workload: any(holds(ranks) for ranks in workload.batches)


def _tokens(ranks: tuple[Batch, ...]) -> list[int]:
    return [len(batch.x_TD) for batch in ranks]


def _dtype(dtype: torch.dtype) -> Feature:
    return Feature(
        str(dtype).removeprefix("torch."),
        lambda workload: workload.config.dtype == dtype,
        lambda freedom: dtype in freedom.dtypes,
        refusable=True,
    )


def _config(name: str, has: Callable[[Config], bool]) -> Feature:
    return Feature(name, lambda workload: has(workload.config), refusable=True)


_SIZES = (
    Feature(
        "idle rank",
        _microbatches(lambda ranks: 0 in _tokens(ranks) and any(_tokens(ranks))),
        lambda freedom: freedom.zero and freedom.uneven,
    ),
    Feature("all ranks idle", _microbatches(lambda ranks: not any(_tokens(ranks))), lambda freedom: freedom.zero),
    Feature("uneven tokens", _microbatches(lambda ranks: len(set(_tokens(ranks))) > 1), lambda freedom: freedom.uneven),
    Feature("two in flight", lambda workload: in_flight(workload.schedule) == 2, lambda freedom: freedom.two_in_flight),
    *map(_dtype, (torch.float32, torch.bfloat16, torch.float64, torch.float16)),
)

# ---- of an exchange -------------------------------------------------------------------------------------------


def _routed(ranks: tuple[Batch, ...]) -> Tensor:
    """Return the expert ids of all routed slots of all ranks."""
    ids = torch.cat([batch.ids_TK.flatten() for batch in ranks])
    return ids[ids >= 0]


def _reached(workload: Workload) -> Iterator[set[int]]:
    """Yield the set of experts that receive tokens, for every microbatch in which any does."""
    for ranks in workload.batches:
        if reached := set(_routed(ranks).tolist()):
            yield reached


def _has_empty_expert(workload: Workload) -> bool:
    return any(len(reached) < workload.config.experts for reached in _reached(workload))


def _has_empty_handed_rank(workload: Workload) -> bool:
    held = workload.config.experts // workload.layout.ep
    return any(len({expert // held for expert in reached}) < workload.layout.ep for reached in _reached(workload))


def _has_hot_expert(workload: Workload) -> bool:
    return workload.config.experts > 1 and any(
        len(ids) > 1 and len(ids.unique()) == 1 for ids in map(_routed, workload.batches)
    )


def _has_tied_weights(batch: Batch) -> bool:
    weights_TK = batch.weights_TK.masked_fill(batch.ids_TK < 0, torch.nan).sort(1).values  # NaN equals nothing
    return bool((weights_TK[:, 1:] == weights_TK[:, :-1]).any())


def _weights(has: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[[Workload], bool]:
    """Return the condition that `has` is true of some weight of a routed slot."""
    return lambda workload: any(
        bool(has(batch.weights_TK[batch.ids_TK >= 0], workload.config.dtype).any())
        for ranks in workload.batches
        for batch in ranks
    )


def _drops(name: str, has: Callable[[Tensor], bool]) -> Feature:
    """Return the feature that `has` is true of the empty slots (T, K) of some rank that has tokens."""
    return Feature(
        name,
        _microbatches(lambda ranks: any(has(batch.ids_TK < 0) for batch in ranks if len(batch.ids_TK))),
        lambda freedom: freedom.dropped,
    )


PROBE = (
    *_SIZES,
    Feature("empty expert", _has_empty_expert),
    Feature("rank that receives nothing", _has_empty_handed_rank, lambda freedom: freedom.layout.ep > 1),
    Feature("one hot expert", _has_hot_expert),
    _drops("dropped slot", lambda empty_TK: bool(empty_TK.any())),
    _drops("token without slots", lambda empty_TK: bool(empty_TK.all(1).any())),
    replace(
        _drops("rank that sends nothing", lambda empty_TK: bool(empty_TK.all())),
        allowed=lambda freedom: freedom.dropped and freedom.few,  # many tokens are hardly ever all empty by chance
    ),
    Feature(
        "expert twice in a token",
        lambda workload: bool(features(workload, "cpu")["duplicate_experts"]),
        lambda freedom: freedom.duplicates,
    ),
    Feature(
        "K = E",
        lambda workload: 1 < workload.config.top_k == workload.config.experts,
        lambda freedom: freedom.layout.ep <= MOST_SLOTS,
        refusable=True,
    ),
    Feature("tied weights", _microbatches(lambda ranks: any(map(_has_tied_weights, ranks)))),
    Feature("zero weight", _weights(lambda weights, dtype: weights == 0), lambda freedom: freedom.odd_weights),
    Feature("negative weight", _weights(lambda weights, dtype: weights < 0), lambda freedom: freedom.odd_weights),
    Feature(
        "subnormal weight",
        _weights(lambda weights, dtype: (weights != 0) & (weights.abs() < torch.finfo(weighing_dtype(dtype)).tiny)),
        lambda freedom: any(map(freedom.subnormal_in, freedom.dtypes)),
    ),
)

# ---- of a router ----------------------------------------------------------------------------------------------


def _has_tied_logits(workload: Workload) -> bool:
    """Return whether two experts have the same row of the router, and some token is not all zeros."""
    router_ED = workload.parameters["router", None]
    tokens = any(bool(batch.x_TD.any()) for ranks in workload.batches for batch in ranks)
    return tokens and len(router_ED.unique(dim=0)) < len(router_ED)


def _has_blank_token(batch: Batch) -> bool:
    return bool((batch.x_TD == 0).all(1).any())


def _has_large_token(batch: Batch) -> bool:
    return bool((batch.x_TD.abs() > LARGE / 4).any())


_has_large_logits = _microbatches(lambda ranks: any(map(_has_large_token, ranks)))


ROUTE = (
    *_SIZES,
    Feature("tied logits", _has_tied_logits),
    Feature("token of zeros", _microbatches(lambda ranks: any(map(_has_blank_token, ranks)))),
    Feature("large logits", _has_large_logits, refusable=True),  # with softmax scores alone, which a router may refuse
    _config("softmax", lambda config: config.routing.score == "softmax"),
    _config("softmax over the selected", lambda config: config.routing.score == "softmax_topk"),
    _config("sigmoid", lambda config: config.routing.score == "sigmoid"),
    _config("sqrtsoftplus", lambda config: config.routing.score == "sqrtsoftplus"),
    _config("normalised", lambda config: config.routing.normalise),
    _config("scaled", lambda config: config.routing.scale != 1),
    _config("balancing bias", lambda config: config.routing.balance_bias),
    _config("groups", lambda config: config.routing.groups is not None),
    Feature(  # scores underflow then, and are no larger than what masks the other groups where that is 0
        "large logits in groups",
        lambda workload: workload.config.routing.groups is not None and _has_large_logits(workload),
        refusable=True,
    ),
    _config("K = E", lambda config: 1 < config.top_k == config.experts),
    _config("K = 1", lambda config: config.top_k == 1 < config.experts),
)
