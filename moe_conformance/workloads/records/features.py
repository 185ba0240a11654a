"""What a workload asks of a backend, in the words of `contract.Limit.on`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Limit, Routing
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads import misuse
from moe_conformance.workloads.records.runs import ON_EXCHANGE, Script
from moe_conformance.workloads.records.schedule import BEGIN_TRAINING, FORWARD_ALONE, executes, most_open, operations
from moe_conformance.workloads.records.workload import Call, Workload


def features(workload: Workload, device: str) -> dict[str, Any]:
    """Return every feature that a limit may speak of, by name."""
    return {name: feature(workload, device) for name, feature in _FEATURES.items()}


def broken(limits: Sequence[Limit], workload: Workload, device: str) -> Limit | None:
    """Return the first limit that the workload would break, or None.

    Batches are drawn only where a limit speaks of them: a run asks this of all its cases before the first begins.
    """
    return next((limit for limit in limits if not limit.allows(_FEATURES[limit.on](workload, device))), None)


def cell_limits(limits: Sequence[Limit], layout: Layout) -> tuple[Limit, ...]:
    """Return the limits that every workload on a layout breaks."""
    of_layout = {"spread_experts": layout.ep > 1, "sharded_experts": layout.etp > 1}
    return tuple(limit for limit in limits if limit.on in of_layout and not limit.allows(of_layout[limit.on]))


ZERO_TOKENS, IN_FLIGHT = "zero tokens", "in flight"


def traits(workload: Workload) -> tuple[str, ...]:
    """Return what a report tells of a workload: a rank has no tokens, several microbatches are under way at once."""
    empty = any(0 in tokens for tokens in _sizes(workload))
    open_at_once = max(under_way(workload), halves_in_flight(workload.schedule)) > 1
    return tuple(trait for trait, has in ((ZERO_TOKENS, empty), (IN_FLIGHT, open_at_once)) if has)


def shows(*words: str) -> Callable[[Workload], bool]:
    """Return the condition that a workload is drawn to show one of these."""
    return lambda workload: not workload.shows.isdisjoint(words)


def has_empty_slots(workload: Workload) -> bool:
    """Return whether any token has a slot that is not routed."""
    return any(bool((ids_TK < 0).any()) for ids_TK in _ids(workload))


def has_lost_tokens(workload: Workload) -> bool:
    """Return whether any token has no slot left."""
    return any(bool((batch.ids_TK < 0).all(1).any()) for microbatch in workload.batches for batch in microbatch)


def somebody_gets_all(workload: Workload) -> bool:
    """Return whether all tokens of a group select one ep coordinate's experts, with all the slots that they can.

    Experts are counted in equal runs, one for each coordinate.
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
    """Return whether experts of a rank's tokens lie on other ranks."""
    return layout.ep * layout.etp > 1


def repeated(workload: Workload) -> bool:
    """Return whether three microbatches or more ask for the same experts, each on every rank."""
    first, *others = workload.batches
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    return len(others) > 1 and all(torch.equal(one.ids_TK, another.ids_TK) for one, another in pairs)


def has_filled_memory(workload: Workload) -> bool:
    """Return whether uninitialised memory is filled."""
    return workload.memory == "filled"


def likened(workload: Workload) -> bool:
    """Return whether twins are compared with runs of it."""
    return bool(workload.likened) and len(workload.batches) == 1 and workload.config.dtype != torch.float64


def likened_sums(workload: Workload) -> bool:
    """Return whether its microbatches are run alone as well."""
    return bool(workload.likened) and len(workload.batches) > 1


def likened_steps(workload: Workload) -> bool:
    """Return whether its microbatches are also steps of their own, with gradients cleared in between.

    In the quick profile on the layout that has replicas.
    """
    return likened_sums(workload) and (workload.likened == "full" or workload.layout.edp > 1)


def likened_once(workload: Workload) -> bool:
    """Return whether twins are compared with runs of it that cost more, or say little new from layout to layout.

    In the quick profile on the layout that has replicas, which every backend offers.
    """
    return likened(workload) and (workload.likened == "full" or workload.layout.edp > 1)


def differentiated(workload: Workload) -> bool:
    """Return whether its gradients are compared with differences between twin runs, which takes double precision.

    In the quick profile on the layout that has replicas.
    """
    asked = bool(workload.likened) and workload.config.dtype == torch.float64
    return asked and (workload.likened == "full" or workload.layout.edp > 1)


def bare_answers(workload: Workload) -> bool:
    """Return whether every token's output is the output of one expert for it, times 1."""
    weights = [batch.weights_TK for ranks in workload.batches for batch in ranks]
    backward = len(workload.batches) == 1 and workload.goes_backward(0)
    return backward and all(w.shape[1] == 1 and bool((w == 1).all()) and len(w) > 1 for w in weights)


def all_alike(workload: Workload) -> bool:
    """Return whether runs are likened to it, and all tokens of a rank have the same ids, weights and upstream."""
    batches = [batch for microbatch in workload.batches for batch in microbatch]
    fed = [each for batch in batches for each in (batch.ids_TK, batch.weights_TK, batch.upstream)]
    return likened(workload) and all(bool((each == each[:1]).all()) for each in fed)


def without_gradients(workload: Workload) -> bool:
    """Return whether some microbatch runs forward without gradients."""
    return executes(workload.schedule, *FORWARD_ALONE)


def under_way(workload: Workload) -> int:
    """Return how many microbatches are under way at the same time; without a schedule all are, one if there is none."""
    return in_flight(workload.schedule) if workload.schedule else max(1, len(workload.batches))


def in_flight(schedule: str) -> int:
    """Return how many microbatches are between their forward and their backward at the same time.

    One that runs without gradients is as long as its forward lasts: it dispatches beside those that are open.
    """
    return max(1, len(most_open(schedule, BEGIN_TRAINING, {"backward"}, FORWARD_ALONE)))


def several_in_flight(workload: Workload) -> bool:
    """Return whether microbatches overlap in time."""
    return in_flight(workload.schedule) > 1


def outputs_meet_others(workload: Workload) -> bool:
    """Return whether outputs have to outlive other microbatches: those in flight, or that no backward follows."""
    return several_in_flight(workload) or (len(workload.batches) > 1 and without_gradients(workload))


def halves_in_flight(schedule: str) -> int:
    """Return how many microbatches are between their dispatch and their combine at the same time."""
    return max(1, len(most_open(schedule, {"dispatch"}, {"combine"})))


def _uneven_in_tp(workload: Workload) -> bool:
    """Return whether the ranks of some tp group hold different numbers of tokens in some microbatch."""
    return any(
        len({tokens[rank] for rank in ranks}) > 1
        for tokens in workload.tokens
        for ranks in workload.layout.groups()["tp"]
    )


_EXCHANGED_BY_CALLS = (Script("token_exchange"), Script("places_exchange"))  # bare tokens and ids are passed


def _calls(workload: Workload) -> tuple[Call, ...]:
    return workload.calls if workload.run in _EXCHANGED_BY_CALLS else ()


def _sizes(workload: Workload) -> list[set[int]]:
    """Return the T of all ranks, of every microbatch and of every call that exchanges tokens."""
    batches = list(map(set, workload.tokens))
    handed = [[given["x_TD"] for given in call.given if "x_TD" in given] for call in _calls(workload)]
    return batches + [{len(x_TD) for x_TD in call} for call in handed if call]


def _ids(workload: Workload) -> list[Tensor]:
    """Return every table of ids, (T, K): of batches, and of routings and tables that a script passes."""
    handed = [value for call in workload.calls for given in call.given for value in given.values()]
    routings = [value.ids_TK for value in handed if isinstance(value, Routing)]
    tables = [given["ids_TK"] for call in _calls(workload) for given in call.given if "ids_TK" in given]
    return [batch.ids_TK for microbatch in workload.batches for batch in microbatch] + routings + tables


def _weights(workload: Workload) -> list[Tensor]:
    """Return the weights of all routed slots, (P,), of batches and of routings that a script passes."""
    handed = [value for call in workload.calls for given in call.given for value in given.values()]
    routings = [value for value in handed if isinstance(value, Routing)]
    batches = [batch for microbatch in workload.batches for batch in microbatch]
    pairs = [(each.ids_TK, each.weights_TK) for each in batches] + [(each.ids_TK, each.weights_TK) for each in routings]
    fitting = [(ids_TK, weights_TK) for ids_TK, weights_TK in pairs if ids_TK.shape == weights_TK.shape]  # wrong use
    return [weights_TK[ids_TK >= 0] for ids_TK, weights_TK in fitting]


def _is_wrong_use(workload: Workload) -> bool:
    """Return whether input is such that no exchange can be made of it, or answers do not fit the handle.

    More tokens than a configured bound are none of that, nor are copies that differ: each could be exchanged without
    the setting, and who offers the setting has to refuse it (PACK-12, EXCH-37). Nor is a handle that is used twice,
    which may be answered.
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
    """Of a config that is packed building decides: see `contract.Limit`."""
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
        1 + workload.twist.rehearsed + sum(each.microbatch is None for each in operations(workload.schedule))
    ),
    "recomputed": lambda workload, _: bool(workload.twist.recomputed),
    "deterministic": lambda workload, _: workload.twist.deterministic,
    "wrong_use": lambda workload, _: workload.run == ON_EXCHANGE and _is_wrong_use(workload),
}
