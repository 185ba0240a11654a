"""The options of shortcuts and workloads of their pairs: equal splits, round robin, weights that change."""

from __future__ import annotations

from typing import get_args

from moe_conformance.chapters.fast_paths.workloads.equal_splits import EXCHANGE
from moe_conformance.chapters.fast_paths.workloads.round_robin import DEALT, Dealt, dealt_workload, starts_elsewhere
from moe_conformance.chapters.fast_paths.workloads.weights import changed
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import DTYPES, LAYOUTS, SCHEDULED, WIDTHS, sizes_of, turns_of
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records.changes import Way
from moe_conformance.workloads.records.routes import anywhere
from moe_conformance.workloads.records.runs import ON_CHANGING_EXPERTS
from moe_conformance.workloads.records.workload import Mode, Workload

_WEIGHTS = {
    "native": "as the backend does it",
    "input": "rows are weighted before the expert",
    "output": "outputs are weighted after it",
}
_HELD = {
    "K": "a token goes to all experts of one rank",
    "more than K": "several tokens share a rank's experts",
    "fewer than K": "a token goes to several ranks",
}
_STARTS = {"0": "every rank begins at the first expert", "elsewhere": "ranks begin at different experts"}
_CHANGED = "a cached form of it is stale"
_MODES = {"no_grad": "nothing is recorded", "inference_mode": "writes are counted by no version"}


def _named(of: tuple[str, ...]) -> dict[str, str]:
    return {name: LAYOUTS[name] for name in of}


_EQUAL = (
    readers.layout(_named(("ep2", "ep4", "ep2-edp2", "tp2-ep2-edp2", "ep2-etp2"))),
    readers.dtype(),
    readers.top_k(),
    readers.experts(),
    readers.hidden(),
    readers.tokens(),
    readers.schedule(),
    readers.memory(),
    readers.asynchrony(),
)
_EQUAL_RULES = (Rule({"tokens": ("changing",), "schedule": ("one",)}, "one microbatch has one number of tokens"),)


def _equal(name: str, row: Row, layout: Layout) -> Workload:
    config = {**sizes_of(row, layout.ep), "padding.splits": "equal"}
    recipe = Recipe(
        name,
        anywhere,
        config=config,
        turns=turns_of(row["tokens"]),
        schedule=SCHEDULED[row["schedule"]],
        memory="filled" if row["memory"] == "filled" else "plain",
        asynchrony="poisoned" if row["asynchrony"] == "poisoned" else "plain",
    )
    return exchange_workload(recipe, EXCHANGE, "default", layout)


def _held(workload: Workload) -> str:
    held, K = workload.config.experts // workload.layout.ep, workload.config.top_k
    return "K" if held == K else "more than K" if held > K else "fewer than K"


_DEALT = (
    readers.layout(_named(("single", "ep2", "tp2-ep2-edp2", "ep2-etp2"))),
    readers.dtype(),
    readers.top_k(),
    readers.hidden(),
    readers.tokens(),
    readers.schedule(),
    Option("held", _HELD, _held),
    Option("starts", _STARTS, lambda workload: "elsewhere" if starts_elsewhere(workload) else "0"),
    Option("weights", _WEIGHTS, lambda workload: workload.config.weights_applied),
)
_DEALT_RULES = (
    Rule({"layout": ("single",), "tokens": ("uneven",)}, "one rank has no others"),
    Rule({"layout": ("single",), "tokens": ("rank without",), "schedule": ("one",)}, "no token would be there at all"),
    Rule({"layout": ("single",), "held": ("fewer than K",)}, "a rank that holds all experts holds K"),
    Rule({"top_k": ("1",), "held": ("fewer than K",)}, "a rank would hold no expert"),
    Rule({"layout": ("single",), "top_k": ("1",), "held": ("K",), "starts": ("elsewhere",)}, "there is one expert"),
    Rule({"tokens": ("changing",), "schedule": ("one",)}, "one microbatch has one number of tokens"),
)


def _dealt(name: str, row: Row, layout: Layout) -> Workload:
    K = int(row["top_k"])
    held = {"K": K, "more than K": K + 3, "fewer than K": K // 2 + K % 2}[row["held"]]
    config = {
        "hidden": WIDTHS[row["hidden"]],
        "dtype": DTYPES[row["dtype"]],
        "weights_applied": row["weights"],
    }
    deal = Dealt(
        held,
        K,
        starts=(0,) if row["starts"] == "0" else (1, 3, 2),
        config=config,
        schedule=SCHEDULED[row["schedule"]],
        turns=turns_of(row["tokens"]),
    )
    return dealt_workload(name, deal, "default", layout)


def _way(workload: Workload) -> str:
    ways = {call.given[0]["way"] for call in workload.calls if call.method == "change"}
    return ways.pop() if len(ways) == 1 else ""


def _mode(workload: Workload) -> str:
    modes = {call.modes for call in workload.calls if call.method == "forward"}
    return "+".join(modes.pop()) if len(modes) == 1 else ""


_CHANGES = (
    readers.layout(_named(("single", "ep2-edp2"))),
    readers.dtype("float32", "bfloat16", "float16"),
    Option("way", {way: _CHANGED for kind in get_args(Way) for way in get_args(kind)}, _way),
    Option("mode", _MODES, _mode),
    Option(
        "experts",
        {"2": "a rank may hold one expert: no stacked form", "4": "several on each rank", "6": "three on each of two"},
        lambda workload: str(workload.config.experts),
    ),
)


_CHANGES_RULES = (
    Rule(
        {"way": ("a step of a fused optimiser",), "dtype": ("bfloat16", "float16")},
        "gradients may be in float32, which torch's fused step refuses beside narrower parameters",
    ),
)


def _changes(name: str, row: Row, layout: Layout) -> Workload:
    ways: tuple[Way, ...] = (row["way"],) * 2  # type: ignore[assignment]
    modes: tuple[Mode, ...] = (row["mode"],)  # type: ignore[assignment]
    return changed(name, ways, modes, layout, DTYPES[row["dtype"]], int(row["experts"]))


SURFACES = (
    Surface("equal_splits", (EXCHANGE,), _EQUAL, _EQUAL_RULES, _equal),
    Surface("dealt", (DEALT,), _DEALT, _DEALT_RULES, _dealt, first_variant=True),
    Surface("changed_weights", (ON_CHANGING_EXPERTS,), _CHANGES, _CHANGES_RULES, _changes, first_variant=True),
)
