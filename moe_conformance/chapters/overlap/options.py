"""The options of overlapped steps, and workloads of their pairs."""

from __future__ import annotations

from typing import Any

from moe_conformance.chapters.overlap.workloads import OverlapStep, StepRecipe, step_workload
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import LAYOUTS, NO, TOKENS, YES, sizes_of
from moe_conformance.workloads.records.workload import Workload

_LAYOUTS = {
    **{name: LAYOUTS[name] for name in ("single", "ep2", "ep2-edp2")},
    "ep2-etp2": "rows are gathered and sums scattered beside the exchange",
}
_SHARED = {NO: "nothing beside the exchange", "one": "a shared expert runs meanwhile", "gate": "with a gate of its own"}
_MICROBATCHES = {"1": "none to overlap with", "2": "one pair", "3": "the last has no partner", "4": "two pairs"}
_WAITS = {
    "plain": "collectives are done when they return",
    "poisoned": "outputs hold NaN before wait(): early reads show",
    "watched": "what is read and written before wait() is recorded",
}
_SIZES = {"even": (12,), "uneven": (13, 6, 11, 8), "rank without": (9, 0, 12, 7), "one token": (1,)}


def _shared(workload: Workload) -> str:
    of = workload.config.shared
    return NO if not of.ffn else "" if of.bias or len(of.ffn) > 1 else "gate" if of.gate else "one"


_OPTIONS = (
    readers.layout(_LAYOUTS),
    readers.dtype("float32", "bfloat16", "float16"),
    readers.top_k(),
    readers.experts(),
    readers.hidden(),
    Option("tokens", {name: TOKENS[name] for name in _SIZES}, readers.tokens().read),
    Option("microbatches", _MICROBATCHES, lambda workload: str(len(workload.batches))),
    Option("asynchrony", _WAITS, lambda workload: workload.asynchrony),
    Option("shared", _SHARED, _shared),
    readers.yes("deferred", "weight gradients come later", lambda w: w.config.overlap.deferred_weights),
    readers.yes("recompute", "experts run again in the backward", lambda w: w.config.overlap.recompute_experts),
    readers.yes("capacity", "slots are dropped", lambda w: w.config.capacity.factor),
)
_RULES = (
    Rule({"layout": ("single",), "tokens": ("uneven", "rank without")}, "one rank has no others"),
    Rule({"layout": ("single",), "asynchrony": ("poisoned", "watched")}, "nothing is sent"),
    Rule({"tokens": ("one token",), "capacity": (YES,)}, "one token fits in any capacity"),
)


def _make(name: str, row: Row, layout: Layout) -> Workload:
    config: dict[str, Any] = {
        **sizes_of(row, layout.ep),
        "overlap.deferred_weights": row["deferred"] == YES,
        "overlap.recompute_experts": row["recompute"] == YES,
    }
    config |= {"shared.ffn": (20,), "shared.gate": row["shared"] == "gate"} if row["shared"] != NO else {}
    config |= {"capacity.factor": 0.5} if row["capacity"] == YES else {}
    recipe = StepRecipe(
        name,
        config,
        _SIZES[row["tokens"]],
        int(row["microbatches"]),
        row["asynchrony"],  # type: ignore[arg-type]
    )
    return step_workload(recipe, layout)


SURFACES = (Surface("overlap", (OverlapStep(),), _OPTIONS, _RULES, _make, first_variant=True),)
