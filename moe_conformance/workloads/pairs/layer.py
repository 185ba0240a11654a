"""The options of whole layers and the workloads of their pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.layers import LayerRecipe, draw_layer
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import NO, SCHEDULED, YES
from moe_conformance.workloads.pairs.router import balance_bias, config_of, normalise, scale, score, wide
from moe_conformance.workloads.records.runs import LayerStep
from moe_conformance.workloads.records.workload import Workload

_SHARED = {
    NO: "routed experts alone",
    "one": "one shared expert",
    "gate": "one with a gate of its own",
    "several": "two of different widths",
    "bias": "one with an output bias, which no padding row may get",
    "beside": "one that overlaps the exchange",
}
_CAPACITY = {
    NO: "no token is dropped",
    "weights": "half of the slots: those of low weight are dropped",
    "position": "half of the slots: the last are dropped",
}
_FFNS: dict[str, dict[str, Any]] = {
    NO: {},
    "one": {"shared.ffn": (24,)},
    "gate": {"shared.ffn": (24,), "shared.gate": True},
    "several": {"shared.ffn": (16, 24)},
    "bias": {"shared.ffn": (16,), "shared.bias": True},
    "beside": {"shared.ffn": (24,), "shared.overlap": True},
}


def shared() -> Option:
    """Return the option of shared experts."""

    def read(workload: Workload) -> str:
        of = workload.config.shared
        special = [name for name, there in (("gate", of.gate), ("bias", of.bias), ("beside", of.overlap)) if there]
        plain = NO if not of.ffn else "one" if len(of.ffn) == 1 else "several"
        return plain if not special else special[0] if len(special) == 1 and plain == "one" else ""

    return Option("shared", _SHARED, read)


# Even numbers, as they may be two columns, and few: who is dropped is to be clear.
_TOKENS = {"even": (14,), "uneven": (14, 8, 12, 6), "rank without": (10, 0, 12, 6)}


def _capacity(workload: Workload) -> str:
    capacity = workload.config.capacity
    return NO if capacity.factor is None else capacity.drop_policy if capacity.factor == 0.5 else ""


_OPTIONS = (
    readers.layout(),
    readers.dtype("float32", "bfloat16", "float16"),
    readers.top_k(),
    score(),
    normalise(),
    scale(),
    balance_bias(),
    wide(),
    shared(),
    Option("capacity", _CAPACITY, _capacity),
    Option("tokens", {name: readers.TOKENS[name] for name in _TOKENS}, readers.tokens().read),
    readers.schedule("one", "in turn", "in flight", "inference"),
    readers.lead(),
    readers.asynchrony(),
)
_RULES = (
    Rule({"layout": ("single",), "tokens": ("uneven",)}, "one rank has no others"),
    Rule({"layout": ("single",), "tokens": ("rank without",), "schedule": ("one",)}, "no token would be there at all"),
    Rule({"layout": ("single",), "asynchrony": ("poisoned",)}, "nothing is sent"),
    Rule({"score": ("softmax",), "top_k": ("5", "6", "10")}, "so many of 16 softmax scores have no clear margin"),
    Rule({"score": ("softmax_topk",), "balance_bias": (YES,)}, "biased logits have no clear margin"),
    Rule({"top_k": ("10",), "score": ("sigmoid", "sqrtsoftplus")}, "ten of 16 bounded scores have no clear margin"),
    Rule({"capacity": ("position", "weights"), "top_k": ("5", "6", "10")}, "too many slots tie for the last place"),
    Rule({"capacity": ("weights",), "top_k": ("1",), "score": ("softmax_topk",)}, "the only weight is 1: all tie"),
    Rule({"capacity": ("weights",), "top_k": ("1",), "normalise": (YES,)}, "the only weight is 1: all tie"),
    Rule({"capacity": ("position", "weights"), "dtype": ("bfloat16", "float16")}, "rounding decides what is dropped"),
)


def _make(name: str, row: Row, layout: Layout) -> Workload:
    config = {**config_of(row), **_FFNS[row["shared"]]}
    if row["capacity"] != NO:
        config |= {"capacity.factor": 0.5, "capacity.drop_policy": row["capacity"]}
    recipe = LayerRecipe(
        name,
        config,
        _TOKENS[row["tokens"]],
        SCHEDULED[row["schedule"]],
        "two_dims" if row["lead"] == "two_dims" else "flat",
        "poisoned" if row["asynchrony"] == "poisoned" else "plain",
    )
    workload = draw_layer(recipe, layout)
    return workload if row["capacity"] == NO else replace(workload, run=LayerStep(drops=True))


SURFACES = (Surface("layer", (LayerStep(), LayerStep(drops=True)), _OPTIONS, _RULES, _make),)
