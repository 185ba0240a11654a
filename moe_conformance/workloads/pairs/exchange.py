"""The options of exchanges, with the suite's expert or the backend's own, and the workloads of their pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import SCHEDULED, sizes_of, turns_of
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records.routes import Route, anywhere, dropped, duplicates, empty_expert
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Workload

CHUNKED = ExchangeStep(option="chunks")


def _reaching(T: int, config: Config, layout: Layout, generator: torch.Generator) -> Tensor:
    """Route every token to K different experts, and one to expert 1, which few tokens could leave idle."""
    ids_TK = anywhere(T, config, layout, generator)
    if T and not bool((ids_TK == 1).any()):
        ids_TK[0, 0] = 1
    return ids_TK


_SLOTS: dict[str, tuple[Route, str]] = {
    "full": (_reaching, "every slot is routed"),
    "some empty": (dropped, "some slots, and all of a token, are empty: no row is sent for them"),
    "twice": (duplicates, "an expert is in two slots of a token: a dense map holds it once"),
    "idle expert": (empty_expert, "an expert gets no token of any rank: a segment of no rows"),
}


def _slots(workload: Workload) -> str:
    """Return what is special of the ids of a workload, the first thing if two are."""
    ids = [batch.ids_TK for microbatch in workload.batches for batch in microbatch]
    has = {"some empty": any(bool((each < 0).any()) for each in ids)}
    ranked = [each.sort(1).values for each in ids]
    has["twice"] = any(bool(((e[:, 1:] == e[:, :-1]) & (e[:, 1:] >= 0)).any()) for e in ranked)
    reached = {expert for each in ids for expert in each.unique().tolist()}
    has["idle expert"] = 1 not in reached and len(reached) > 1
    return next((name for name, there in has.items() if there), "full")


_SHARED = (
    readers.layout(),
    readers.dtype(),
    readers.top_k(),
    readers.experts(),
    readers.hidden(),
    readers.tokens(),
)
_OPTIONS = (
    *_SHARED,
    readers.schedule(),
    Option("slots", {name: why for name, (_, why) in _SLOTS.items()}, _slots),
    readers.lead(),
    readers.memory(),
    readers.asynchrony(),
)
_PROBE = (
    *_OPTIONS,
    Option(
        "weights",
        {
            "native": "as the backend does it",
            "input": "rows are weighted before the expert",
            "output": "outputs are weighted after it",
        },
        lambda workload: workload.config.weights_applied,
    ),
    Option(
        "padding",
        {
            "no": "tokens as they are",
            "group_max": "tokens of a group are padded to its largest number",
            "bound": "they are padded to a bound that is configured",
        },
        lambda workload: workload.config.padding.tokens,
    ),
)

_ONE_RANK = "one rank has no others that differ from it, and nothing is sent"
_RULES = (
    Rule({"layout": ("single",), "tokens": ("uneven",)}, _ONE_RANK),
    Rule({"layout": ("single",), "asynchrony": ("poisoned",)}, _ONE_RANK),
    Rule({"layout": ("single",), "tokens": ("rank without",), "schedule": ("one",)}, "no token would be there at all"),
    Rule({"tokens": ("changing",), "schedule": ("one",)}, "one microbatch has one number of tokens"),
    Rule({"tokens": ("one token",), "lead": ("two_dims",)}, "one token is no two columns"),
    Rule({"top_k": ("1",), "slots": ("twice",)}, "one slot holds no expert twice"),
    Rule({"tokens": ("one token",), "slots": ("some empty",)}, "the only token would have no slot at all"),
)


def _recipe(name: str, row: Row, layout: Layout) -> Recipe:
    config = sizes_of(row, layout.ep)
    return Recipe(
        name,
        _SLOTS[row["slots"]][0],
        config=config,
        turns=turns_of(row["tokens"], 2 if row["lead"] == "two_dims" else 1),
        schedule=SCHEDULED[row["schedule"]],
        lead="two_dims" if row["lead"] == "two_dims" else "flat",
        memory="filled" if row["memory"] == "filled" else "plain",
        asynchrony="poisoned" if row["asynchrony"] == "poisoned" else "plain",
    )


def _probe(name: str, row: Row, layout: Layout) -> Workload:
    recipe = _recipe(name, row, layout)
    padding: dict[str, Any] = {"padding.tokens": row["padding"]}
    if row["padding"] != "no":
        padding["padding.alignment"] = 8
    if row["padding"] == "bound":
        padding["padding.bound"] = max(max(ranks) for ranks in recipe.turns)
    config = {**recipe.config, "weights_applied": row["weights"], **padding}
    return exchange_workload(replace(recipe, config=config), ExchangeStep(), "default", layout)


def _chunked(name: str, row: Row, layout: Layout) -> Workload:
    recipe = _recipe(name, row, layout)
    config = {**recipe.config, "overlap.chunks": int(row["chunks"])}
    return replace(exchange_workload(replace(recipe, config=config), ExchangeStep(), "default", layout), run=CHUNKED)


_BIASES = {
    "none": "experts without biases",
    "output": "a bias behind down: rows that are no token's would get it too",
    "all": "biases of all three: GPT-OSS",
}
_FFN = {"16": "a multiple of 16", "odd": "no row of down but the first is aligned"}


def _own(name: str, row: Row, layout: Layout) -> Workload:
    recipe = _recipe(name, row, layout)
    config = {**recipe.config, "hidden": {"64": 64, "16": 48, "8": 24, "2": 30, "odd": 33}[row["hidden"]]}
    config |= {"expert_biases": row["biases"], "ffn": 16 if row["ffn"] == "16" else 15}
    run = ExpertsStep(option="biases") if row["biases"] != "none" else ExpertsStep()
    return exchange_workload(replace(recipe, config=config), run, "default", layout)


SURFACES = (
    Surface("exchange", (ExchangeStep(),), _PROBE, _RULES, _probe),
    Surface(
        "chunks",
        (CHUNKED,),
        (
            *_SHARED,
            readers.schedule("one", "in turn", "in flight", "inference"),  # whole forwards are cut into chunks
            *_OPTIONS[len(_SHARED) + 1 :],
            Option(
                "chunks",
                {"2": "two halves", "3": "parts that T is no multiple of", "4": "parts that a few tokens leave empty"},
                lambda workload: str(workload.config.overlap.chunks),
            ),
        ),
        _RULES,
        _chunked,
    ),
    Surface(
        "experts",
        (ExpertsStep(), ExpertsStep(option="biases")),
        (
            *_OPTIONS,
            Option("biases", _BIASES, lambda workload: workload.config.expert_biases),
            Option("ffn", _FFN, lambda workload: "16" if workload.config.ffn % 16 == 0 else "odd"),
        ),
        _RULES,
        _own,
    ),
)
