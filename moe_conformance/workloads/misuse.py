"""Wrong use of an exchange: invalid input on one rank of every group, and expert outputs with a wrong handle.

Every wrong call is followed by a right one, whose result must be as usual. Wrong input is also preceded by a right
call, which catches an exchange that validates its first input only. Exchanges that communicate before dispatch, because
tokens are padded, padded to the capacity or held in copies, get some wrong input again: they have more ways to hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from moe_conformance.contract import Config, Routing
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records import draw as drawing
from moe_conformance.workloads.records.runs import ON_EXCHANGE
from moe_conformance.workloads.records.workload import Batch, Call, Ref, Workload
from moe_conformance.workloads.selection.profiles import Profile

TOKENS = (8, 4)  # of every rank, by microbatch: no rank receives equally many rows of both

Given = Mapping[str, Any]


def culprits(layout: Layout, name: str) -> frozenset[int]:
    """Return the ranks with wrong input: one of every exchange group, chosen by a hash of the name."""
    return frozenset(group[zlib.crc32(name.encode()) % len(group)] for group in layout.groups()["ep_etp"])


# ---- input ---------------------------------------------------------------------------------------------------


def _with_id(batch: Batch, expert: int) -> Batch:
    ids_TK = batch.ids_TK.clone()
    ids_TK[1, 0] = expert
    return replace(batch, ids_TK=ids_TK)


Spoil = Callable[[Batch, Config], Batch]

INPUTS: dict[str, tuple[str, Spoil]] = {
    "id-too-high": ("an id of E", lambda batch, config: _with_id(batch, config.experts)),
    "id-too-low": ("an id of -2", lambda batch, config: _with_id(batch, -2)),
    "ids-in-float": ("ids in float32", lambda batch, config: replace(batch, ids_TK=batch.ids_TK.float())),
    "weights-of-one-slot": (
        "weights of shape (T, 1) for K slots",
        lambda batch, config: replace(batch, weights_TK=batch.weights_TK[:, :1]),
    ),
    "more-tokens-than-ids": (
        "a token more than ids",
        lambda batch, config: replace(batch, x_TD=torch.cat([batch.x_TD, batch.x_TD[:1]])),
    ),
    "narrow-tokens": (
        "tokens of half the width",
        lambda batch, config: replace(batch, x_TD=batch.x_TD[:, : config.hidden // 2]),
    ),
}


SETTINGS: dict[str, Mapping[str, Any]] = {
    "padded": {"padding.tokens": "group_max"},
    "filled": {"capacity.factor": 2.0, "capacity.padded": True},
    "copies": {"token_copies": True},
}
IN_SETTINGS = ("ids-in-float", "more-tokens-than-ids", "narrow-tokens")  # a wrong dtype, a wrong number, a wrong shape


def input_of(workload: Workload) -> str:
    """Return the key of `INPUTS` that a workload tries, in any setting; "" if none."""
    return next(iter(workload.shows & INPUTS.keys()), "")


def _step(batches: tuple[Batch, ...], config: Config, *, may_raise: bool = False) -> Call:
    given = tuple({"x": b.x_TD, "routing": Routing(b.ids_TK, b.weights_TK, config.experts)} for b in batches)
    return Call("step", given, may_raise=may_raise)


def _inputs(blank: Workload, names: Iterable[str], suffix: str = "") -> Iterator[Workload]:
    good, config = blank.batches[0], blank.config
    for name in names:
        _, spoil = INPUTS[name]
        wrong = culprits(blank.layout, f"misuse-{name}{suffix}")
        bad = tuple(spoil(b, config) if rank in wrong else b for rank, b in enumerate(good))
        right = _step(good, config)
        calls = right, _step(bad, config, may_raise=True), right
        yield replace(blank, name=f"misuse-{name}{suffix}", batches=(good,), calls=calls, shows=frozenset({name}))


# ---- answers -------------------------------------------------------------------------------------------------


RIGHT: Given = {"answers_of": Ref(0), "handle_of": Ref(0)}
ANSWERS: dict[str, tuple[str, Given]] = {
    "anothers-handle": ("the handle of another microbatch", {"answers_of": Ref(0), "handle_of": Ref(1)}),
    "narrow-answers": ("answers of half the width", {**RIGHT, "width": 16}),
}
ON_A_RANK = ("narrow-answers",)  # not the handle of another microbatch: other ranks would not expect its rows
TWICE = "combined-twice"  # a handle is used in combine a second time


def answer_of(workload: Workload) -> str:
    """Return the key of `ANSWERS` that a workload tries; "" if none."""
    return next(iter(workload.shows & ANSWERS.keys()), "")


def _answers(blank: Workload) -> Iterator[Workload]:
    ranks = range(blank.layout.world)
    two = tuple(replace(_step(batches, blank.config), method="dispatch") for batches in blank.batches)
    again = _step(blank.batches[0], blank.config)
    blank = replace(blank, schedule="D0 D1 C0 C1")
    for name, (_, wrong) in ANSWERS.items():
        everywhere = Call("combine", tuple(wrong for _ in ranks), may_raise=True)
        right = Call("combine", tuple(RIGHT for _ in ranks))
        calls = (*two, everywhere, right, again)
        yield replace(blank, name=f"misuse-{name}", calls=calls, shows=frozenset({name}))
    for name in ON_A_RANK:
        _, wrong = ANSWERS[name]
        mistaken = culprits(blank.layout, f"misuse-{name}-on-a-rank")
        given = tuple(wrong if rank in mistaken else RIGHT for rank in ranks)
        here = Call("combine", given, may_raise=True)
        calls = (*two, here, again)
        yield replace(blank, name=f"misuse-{name}-on-a-rank", calls=calls, shows=frozenset({name}))
    once = Call("combine", tuple(RIGHT for _ in ranks))
    calls = (two[0], once, replace(once, may_raise=True), again)
    blank = replace(blank, batches=blank.batches[:1], schedule="D0 C0", shows=frozenset({TWICE}))
    yield replace(blank, name=f"misuse-{TWICE}", calls=calls)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all workloads of wrong use for a variant on a layout."""
    config = Config(variant=variant)
    if config.experts % layout.ep:
        config = replace(config, experts=3 * layout.ep)

    def batch(microbatch: int, rank: int) -> Batch:
        generator = drawing.generator("misuse", layout.name, microbatch, rank)
        ids_TK = drawing.in_turn(TOKENS[microbatch], config)
        return drawing.probe_batch(rank, microbatch, ids_TK, config, generator)

    batches = tuple(tuple(batch(m, rank) for rank in range(layout.world)) for m in range(len(TOKENS)))
    blank = Workload("misuse", ON_EXCHANGE, config, layout, batches)
    yield from _inputs(blank, INPUTS)
    yield from _answers(blank)
    first = {rank: ranks[0] for ranks in layout.groups()["tp"] for rank in ranks}
    for name, fields in SETTINGS.items():
        changed = replace(blank, config=config.changed(fields))
        if name == "copies":
            copied = tuple(tuple(ranks[first[rank]] for rank in range(layout.world)) for ranks in batches)
            changed = replace(changed, batches=copied)
        if name != "copies" or layout.tp > 1:
            yield from _inputs(changed, IN_SETTINGS, f"-{name}")


NAMES = (
    *(f"misuse-{name}" for name in INPUTS),
    *(f"misuse-{name}-{setting}" for setting in SETTINGS for name in IN_SETTINGS),
    *(f"misuse-{name}" for name in ANSWERS),
    *(f"misuse-{name}-on-a-rank" for name in ON_A_RANK),
    f"misuse-{TWICE}",
)
