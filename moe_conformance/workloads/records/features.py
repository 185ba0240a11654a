"""Properties of workloads: those that limits are declared on (`contract.Limit.on`), and conditions of checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Limit, Routing
from moe_conformance.contract.limits import SURFACES_BY_DESIGN
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads import misuse
from moe_conformance.workloads.records.runs import ON_EXCHANGE, ExchangeStep, Script
from moe_conformance.workloads.records.schedule import BEGIN_TRAINING, FORWARD_ALONE, executes, most_open, operations
from moe_conformance.workloads.records.workload import Call, Workload


def features(workload: Workload, device: str) -> dict[str, Any]:
    """Return the value of every feature of a workload that a limit may be declared on, by name."""
    return {name: feature(workload, device) for name, feature in _FEATURES.items()}


def broken(limits: Sequence[Limit], workload: Workload, device: str) -> Limit | None:
    """Return the first limit that the workload would break, or None.

    Batches are drawn only if a limit needs them, since a run calls this for all its cases before the first one begins.
    """
    breaks = (limit for limit in limits if _covers(limit, workload))
    return next((limit for limit in breaks if not limit.allows(_FEATURES[limit.on](workload, device))), None)


def _covers(limit: Limit, workload: Workload) -> bool:
    """Return whether a limit is on what a workload runs: one that is by design is on some surfaces alone."""
    run = workload.run
    named = run.surface if isinstance(run, Script) else _SURFACES.get(type(run).__name__)
    return limit.proof != "design" or named in SURFACES_BY_DESIGN


_SURFACES = {"ExchangeStep": "exchange", "ExpertsStep": "experts", "LayerStep": "layer"}


def cell_limits(limits: Sequence[Limit], layout: Layout) -> tuple[Limit, ...]:
    """Return the limits that every workload on a layout breaks; one by design leaves routers and others."""
    of_layout = {"spread_experts": layout.ep > 1, "sharded_experts": layout.etp > 1}
    of_all = (limit for limit in limits if limit.on in of_layout and limit.proof != "design")
    return tuple(limit for limit in of_all if not limit.allows(of_layout[limit.on]))


ZERO_TOKENS, IN_FLIGHT = "zero tokens", "in flight"


def traits(workload: Workload) -> tuple[str, ...]:
    """Return the traits of a workload that a report shows: a rank without tokens, several microbatches in flight."""
    empty = any(0 in tokens for tokens in _sizes(workload))
    open_at_once = max(under_way(workload), halves_in_flight(workload.schedule)) > 1
    return tuple(trait for trait, has in ((ZERO_TOKENS, empty), (IN_FLIGHT, open_at_once)) if has)


def shows(*words: str) -> Callable[[Workload], bool]:
    """Return the condition that one of these words is in `Workload.shows`."""
    return lambda workload: not workload.shows.isdisjoint(words)


def has_empty_slots(workload: Workload) -> bool:
    """Return whether any token has a slot that is not routed. Ids that a router will select are not given, all -1."""
    if isinstance(workload.run, ExchangeStep) and workload.run.routed:
        return False
    return any(bool((ids_TK < 0).any()) for ids_TK in _ids(workload))


def has_lost_tokens(workload: Workload) -> bool:
    """Return whether any token has no slot left."""
    return any(bool((batch.ids_TK < 0).all(1).any()) for microbatch in workload.batches for batch in microbatch)


def somebody_gets_all(workload: Workload) -> bool:
    """Return whether all tokens of an exchange group use as many slots as possible for one ep coordinate's experts.

    Experts are counted in equal contiguous ranges, one for each coordinate.
    """
    held = workload.config.experts // workload.layout.ep
    most = min(workload.config.top_k, held)
    for microbatch in workload.batches:
        for group in workload.layout.groups()["ep_etp"]:
            ids_TK = torch.cat([microbatch[rank].ids_TK for rank in group])
            for first in range(0, workload.config.experts, held):
                mine_TK = (ids_TK >= first) & (ids_TK < first + held)
                if len(ids_TK) and bool((mine_TK.sum(1) == most).all()):
                    return True
    return False


def has_idle_expert(workload: Workload) -> bool:
    """Return whether some expert gets no token of any rank in any microbatch that goes backward."""
    reached: set[int] = set()
    for m, microbatch in enumerate(workload.batches):
        for batch in microbatch if workload.goes_backward(m) else ():
            reached.update(batch.ids_TK.unique().tolist())
    return not reached.issuperset(range(workload.config.experts))


def exchanges(layout: Layout) -> bool:
    """Return whether a layout spreads experts over ranks: ep * etp > 1."""
    return layout.ep * layout.etp > 1


def repeated(workload: Workload) -> bool:
    """Return whether there are three or more microbatches, and all have the same expert ids on every rank."""
    first, *others = workload.batches
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    return len(others) > 1 and all(torch.equal(one.ids_TK, another.ids_TK) for one, another in pairs)


def has_filled_memory(workload: Workload) -> bool:
    """Return whether the workload fills uninitialised memory with NaN."""
    return workload.memory == "filled"


def likened(workload: Workload) -> bool:
    """Return whether twins are compared with the run of a workload of one microbatch, not in float64."""
    return bool(workload.likened) and len(workload.batches) == 1 and workload.config.dtype != torch.float64


def likened_sums(workload: Workload) -> bool:
    """Return whether the microbatches of a workload are also run alone, and their sums compared."""
    return bool(workload.likened) and len(workload.batches) > 1


def likened_steps(workload: Workload) -> bool:
    """Return whether the microbatches of a workload are also run as separate steps, with gradients cleared between.

    In the quick profile only on the layout with replicas.
    """
    return likened_sums(workload) and (workload.likened == "full" or workload.layout.edp > 1)


def likened_once(workload: Workload) -> bool:
    """Return whether the twins that cost more, or depend little on the layout, are compared with the run.

    In the quick profile only on the layout with replicas, which every backend offers.
    """
    return likened(workload) and (workload.likened == "full" or workload.layout.edp > 1)


def differentiated(workload: Workload) -> bool:
    """Return whether gradients are compared with finite differences between twins, which needs float64.

    In the quick profile only on the layout with replicas.
    """
    double = bool(workload.likened) and workload.config.dtype == torch.float64
    return double and (workload.likened == "full" or workload.layout.edp > 1)


def bare_answers(workload: Workload) -> bool:
    """Return whether every token's output is that of one expert with weight 1, in one microbatch with a backward."""
    weights = [batch.weights_TK for ranks in workload.batches for batch in ranks]
    backward = len(workload.batches) == 1 and workload.goes_backward(0)
    return backward and all(w.shape[1] == 1 and bool((w == 1).all()) and len(w) > 1 for w in weights)


def all_alike(workload: Workload) -> bool:
    """Return whether twins are compared with it, and all tokens of a rank have the same ids, weights and upstream."""
    batches = [batch for microbatch in workload.batches for batch in microbatch]
    fed = [tensor for batch in batches for tensor in (batch.ids_TK, batch.weights_TK, batch.upstream)]
    return likened(workload) and all(bool((tensor == tensor[:1]).all()) for tensor in fed)


def without_gradients(workload: Workload) -> bool:
    """Return whether some microbatch runs forward without gradients."""
    return executes(workload.schedule, *FORWARD_ALONE)


def under_way(workload: Workload) -> int:
    """Return how many microbatches are in flight at the same time; without a schedule all are, or 1 without batches."""
    return in_flight(workload.schedule) if workload.schedule else max(1, len(workload.batches))


def in_flight(schedule: str) -> int:
    """Return how many microbatches are between their forward and their backward at the same time.

    A forward without gradients counts while it lasts: it dispatches while others are in flight.
    """
    return max(1, len(most_open(schedule, BEGIN_TRAINING, {"backward"}, FORWARD_ALONE)))


def several_in_flight(workload: Workload) -> bool:
    """Return whether microbatches overlap in time."""
    return in_flight(workload.schedule) > 1


def outputs_meet_others(workload: Workload) -> bool:
    """Return whether outputs must stay valid during other microbatches: some are in flight, or have no backward."""
    return several_in_flight(workload) or (len(workload.batches) > 1 and without_gradients(workload))


def halves_in_flight(schedule: str) -> int:
    """Return how many microbatches are between their dispatch and their combine at the same time."""
    return max(1, len(most_open(schedule, {"dispatch"}, {"combine"})))


def _uneven_in_tp(workload: Workload) -> bool:
    """Return whether the ranks of some tp group hold different numbers of tokens in some microbatch."""
    groups = workload.layout.groups()["tp"]
    for tokens in workload.tokens:
        for ranks in groups:
            if len({tokens[rank] for rank in ranks}) > 1:
                return True
    return False


# Their calls take tokens and ids without batches.
_EXCHANGED_BY_CALLS = (Script("token_exchange"), Script("places_exchange"))


def _calls(workload: Workload) -> tuple[Call, ...]:
    return workload.calls if workload.run in _EXCHANGED_BY_CALLS else ()


def _sizes(workload: Workload) -> list[set[int]]:
    """Return the set of T over all ranks, for every microbatch and every call that exchanges tokens."""
    batches = list(map(set, workload.tokens))
    handed = [[given["x_TD"] for given in call.given if "x_TD" in given] for call in _calls(workload)]
    return batches + [{len(x_TD) for x_TD in call} for call in handed if call]


def _routings(workload: Workload) -> list[Routing]:
    """Return all routings that the calls of a script pass."""
    found: list[Routing] = []
    for call in workload.calls:
        for given in call.given:
            found += [value for value in given.values() if isinstance(value, Routing)]
    return found


def _ids(workload: Workload) -> list[Tensor]:
    """Return all expert ids, as tensors (T, K): those of batches, and those that a script passes, in passes too."""
    routings = [routing.ids_TK for routing in _routings(workload)]
    tables = [given["ids_TK"] for call in _calls(workload) for given in call.given if "ids_TK" in given]
    passes = [entry for call in workload.calls for given in call.given for entry in given.get("passes", ())]
    tables += [entry.ids_TK for entry in passes if entry.ids_TK is not None]
    return [batch.ids_TK for microbatch in workload.batches for batch in microbatch] + routings + tables


def _weights(workload: Workload) -> list[Tensor]:
    """Return the weights of all routed slots, as tensors (P,): of batches, and of routings that a script passes."""
    batches = [batch for microbatch in workload.batches for batch in microbatch]
    pairs = [(batch.ids_TK, batch.weights_TK) for batch in batches]
    pairs += [(routing.ids_TK, routing.weights_TK) for routing in _routings(workload)]
    fitting = [(ids_TK, weights_TK) for ids_TK, weights_TK in pairs if ids_TK.shape == weights_TK.shape]  # wrong use
    return [weights_TK[ids_TK >= 0] for ids_TK, weights_TK in fitting]


def _is_wrong_use(workload: Workload) -> bool:
    """Return whether a workload has input that cannot be exchanged, or expert outputs that do not fit the handle.

    More tokens than a configured bound do not count, nor do copies that differ: these could be exchanged without the
    option, and a backend that offers the option has to refuse them (PACK-12, EXCH-37). A handle that is used twice does
    not count either: it may give a result.
    """
    return bool(misuse.input_of(workload) or misuse.answer_of(workload))


def _duplicates(ids_TK: Tensor) -> bool:
    if ids_TK.shape[1] < 2 or not ids_TK.shape[0]:
        return False
    sorted_TK = torch.sort(ids_TK, dim=1).values
    return bool(((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any())


def _token_counts(workload: Workload) -> frozenset[int]:
    return frozenset().union(*_sizes(workload))


def _uneven(workload: Workload) -> bool:
    """Return whether ranks have different T, for a config that is not packed: see `contract.Limit`."""
    return not workload.config.padding.packed and any(len(tokens) > 1 for tokens in _sizes(workload))


_FEATURES: Mapping[str, Callable[[Workload, str], Any]] = {  # of a workload on a device
    "dtype": lambda workload, _: workload.config.dtype,
    "device": lambda _, device: device,
    "spread_experts": lambda workload, _: workload.layout.ep > 1,
    "sharded_experts": lambda workload, _: workload.layout.etp > 1,
    "tokens": lambda workload, _: _token_counts(workload),
    "uneven_tokens": lambda workload, _: _uneven(workload),
    "uneven_tp_tokens": lambda workload, _: bool(workload.config.shared.ffn) and _uneven_in_tp(workload),
    "zero_tokens": lambda workload, _: 0 in _token_counts(workload),
    "token_dims": lambda workload, _: len(workload.lead_of(0)),
    "duplicate_experts": lambda workload, _: any(_duplicates(ids_TK) for ids_TK in _ids(workload)),
    "zero_weights": lambda workload, _: any(bool((weights == 0).any()) for weights in _weights(workload)),
    "negative_weights": lambda workload, _: any(bool((weights < 0).any()) for weights in _weights(workload)),
    "dropped_slots": lambda workload, _: has_empty_slots(workload),
    "in_flight": lambda workload, _: under_way(workload),
    "halves_in_flight": lambda workload, _: halves_in_flight(workload.schedule),
    "steps": lambda workload, _: (
        1 + workload.twist.rehearsed + sum(operation.microbatch is None for operation in operations(workload.schedule))
    ),
    "recomputed": lambda workload, _: bool(workload.twist.recomputed),
    "deterministic": lambda workload, _: workload.twist.deterministic,
    "wrong_use": lambda workload, _: workload.run == ON_EXCHANGE and _is_wrong_use(workload),
}
