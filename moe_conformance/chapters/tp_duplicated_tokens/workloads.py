"""The pinned workloads in which all ranks of a tp group hold the same tokens, also with routings that differ.

A batch is drawn for the lowest rank of every tp group, and all ranks of the group have it: tokens with the tags of that
rank, ids, weights and upstream gradients. If a name ends in `even`, every rank has the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from moe_conformance.contract import Config, Routing
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import TP2_EP2, Chapter
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records import routes
from moe_conformance.workloads.records.half_precision import drawn_in, in_float16
from moe_conformance.workloads.records.runs import ON_EXCHANGE, ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Batch, Call, Twist, Workload
from moe_conformance.workloads.selection.profiles import Profile

# Rank r has the entry r modulo the length. Only the entries of the lowest ranks of tp groups are used, and every row
# has a number that is not divisible by 2 or 4: tokens that were split over the group would leave a remainder.
_UNEVEN = (9, 0, 13, 0, 7, 0, 3, 0)
_WITHOUT = (7, 7, 0, 0, 5, 5, 1, 1)
_FEW = (1, 1, 3, 3, 2, 2, 0, 0)  # fewer than ranks
_BFLOAT16 = {"dtype": torch.bfloat16}
UNASKED = ExchangeStep(tokens="duplicated", unasked=True)

_PROBE = (
    Recipe("copies-even"),
    Recipe("copies-odd-even", tokens=(11,), config={"top_k": 3}),
    Recipe("copies-uneven", tokens=_UNEVEN),
    Recipe("copies-rank-without-tokens", tokens=_WITHOUT),
    Recipe("copies-few", tokens=_FEW, config={"top_k": 1}),
    Recipe("copies-one-rank-even", routes.one_rank, tokens=(6,), needs_ep=True),
    Recipe("copies-dropped-uneven", routes.dropped, tokens=_UNEVEN),
    Recipe("copies-duplicates-even", routes.duplicates, tokens=(7,)),
    Recipe("copies-two-dims-even", lead="two_dims", tokens=(10,)),
    Recipe("copies-in-flight-uneven", tokens=_UNEVEN, schedule="F0 F1 B1 B0"),
    Recipe("copies-halves-in-flight-even", tokens=(7,), schedule="D0 D1 C1 C0 B0 B1"),
    Recipe("copies-inference-even", tokens=(9,), schedule="N0 F1 I2 B1"),
    Recipe("copies-input-weights-even", config={"weights_applied": "input"}, profile="full"),
    Recipe("copies-padded-uneven", tokens=_UNEVEN, config={"padding.tokens": "group_max", "padding.alignment": 8}),
    Recipe("copies-filled-uneven", tokens=_WITHOUT, memory="filled"),
    Recipe("copies-even-bfloat16", tokens=(9,), config=_BFLOAT16),
)
_EXPERTS = (
    Recipe("copies-own-even"),
    Recipe("copies-own-uneven", tokens=_UNEVEN),
    Recipe("copies-own-rank-without-tokens", tokens=_WITHOUT),
    Recipe("copies-own-accumulated-even", tokens=(7,), schedule="F0 B0 F1 B1"),
    Recipe("copies-own-inference-even", tokens=(9,), schedule="N0 F1 I2 B1"),
    Recipe("copies-own-even-bfloat16", tokens=(9,), config=_BFLOAT16),
)

# One input requires no gradient: tokens after frozen layers, or weights of a frozen router.
_UNASKED: Mapping[Literal["x", "weights"], Recipe] = {
    "x": Recipe("copies-unasked-x-even", tokens=(7,)),
    "weights": Recipe("copies-unasked-weights-even", tokens=(7,)),
}

PROBE = (*_PROBE, *in_float16(_PROBE))
EXPERTS = (*_EXPERTS, *in_float16(_EXPERTS))


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all workloads, on layouts with tp > 1."""
    if layout.tp == 1:
        return
    for run, recipes in ((ExchangeStep(tokens="duplicated"), PROBE), (ExpertsStep(tokens="duplicated"), EXPERTS)):
        for recipe in drawn_in(profile, recipes):
            if recipe.needs_ep and layout.ep == 1:
                continue
            yield _copied(exchange_workload(recipe, run, variant, layout))
    for name, recipe in _UNASKED.items():
        frozen = _copied(exchange_workload(recipe, UNASKED, variant, layout))
        yield replace(frozen, twist=Twist(unasked=(name,)))
    yield from _mismatched(variant, layout)


def _copied(workload: Workload) -> Workload:
    """Return the workload in which every rank has the batches of the lowest rank of its tp group."""
    first = {rank: min(group) for group in workload.layout.groups()["tp"] for rank in group}
    batches = tuple(tuple(ranks[first[rank]] for rank in range(len(ranks))) for ranks in workload.batches)
    return replace(workload, batches=batches, config=replace(workload.config, token_copies=True))


# ---- copies that are none ------------------------------------------------------------------------------------


def _another_id(ids_TK: Tensor, config: Config) -> Tensor:
    ids_TK[-1, 0] = next(e for e in range(config.experts) if e not in ids_TK[-1])
    return ids_TK


def _slot_emptied(ids_TK: Tensor, config: Config) -> Tensor:
    ids_TK[2, 1] = -1
    return ids_TK


def _exchanged(ids_TK: Tensor, config: Config) -> Tensor:
    """Swap the expert ids of two tokens that are routed differently."""
    other = next(t for t in range(1, len(ids_TK)) if not torch.equal(ids_TK[0], ids_TK[t]))
    ids_TK[[0, other]] = ids_TK[[other, 0]]
    return ids_TK


def _slots_exchanged(ids_TK: Tensor, config: Config) -> Tensor:
    return ids_TK.flip(1)


MISMATCHES: Mapping[str, tuple[str, Callable[[Tensor, Config], Tensor]]] = {
    "copies-differ-by-an-id": ("another id in the last token's first slot", _another_id),
    "copies-differ-by-an-empty-slot": ("an empty slot", _slot_emptied),
    "copies-exchange-tokens": ("the routings of two tokens exchanged", _exchanged),
    "copies-exchange-slots": ("every token's slots in another order", _slots_exchanged),
}
_ONE_GROUP = "-in-one-group"  # the copies of the last tp group differ; without this word those of all groups


def mismatched(workload: Workload) -> bool:
    """Return whether the copies of tokens have different routings."""
    return bool(mismatch_of(workload))


def mismatch_of(workload: Workload) -> str:
    """Return the key of `MISMATCHES` that a workload tries; "" if none."""
    return next(iter(workload.shows & MISMATCHES.keys()), "")


def groups_that_differ(workload: Workload) -> tuple[tuple[int, ...], ...]:
    """Return the tp groups in which one rank has a different routing."""
    groups = workload.layout.groups()["tp"]
    return groups[-1:] if _ONE_GROUP in workload.shows else groups


def odd_one_of(workload: Workload, group: tuple[int, ...]) -> int:
    """Return the rank of a tp group that has the different routing: the last, or a middle one if one group differs."""
    return group[len(group) // 2] if _ONE_GROUP in workload.shows else group[-1]


def _mismatched(variant: str, layout: Layout) -> Iterator[Workload]:
    blank = _copied(exchange_workload(Recipe("copies-differ", tokens=(7,)), ExchangeStep(), variant, layout))
    (good,), config = blank.batches, blank.config
    for name, (_, change) in MISMATCHES.items():
        for where in ("", _ONE_GROUP):
            made = replace(blank, name=name + where, run=ON_EXCHANGE, shows=frozenset({name, where} - {""}))
            differing = {odd_one_of(made, group) for group in groups_that_differ(made)}
            bad = tuple(
                replace(batch, ids_TK=change(batch.ids_TK.clone(), config)) if rank in differing else batch
                for rank, batch in enumerate(good)
            )
            right = _step(good, config)  # also before the wrong call, for backends that compare only once
            yield replace(made, calls=(right, _step(bad, config, may_raise=True), right))


def _step(batches: tuple[Batch, ...], config: Config, *, may_raise: bool = False) -> Call:
    given = tuple({"x": b.x_TD, "routing": Routing(b.ids_TK, b.weights_TK, config.experts)} for b in batches)
    return Call("step", given, may_raise=may_raise)


NAMES = (
    *(recipe.name for recipe in (*PROBE, *EXPERTS, *_UNASKED.values())),
    *(name + where for name in MISMATCHES for where in ("", _ONE_GROUP)),
)


CHAPTERS = (
    Chapter(
        (ExchangeStep(tokens="duplicated"), ExpertsStep(tokens="duplicated"), UNASKED, ON_EXCHANGE),
        NAMES,
        draw,
        "every",
        (TP2_EP2,),
    ),
)
