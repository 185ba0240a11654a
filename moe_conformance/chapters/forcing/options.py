"""The options of routers with forced routing, and their workloads."""

from __future__ import annotations

from moe_conformance.chapters.forcing.workloads.forcing import ForcingRecipe, forcing_workload
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import LAYOUTS, SCHEDULED, TOKENS
from moe_conformance.workloads.pairs.router import balance_bias, config_of, groups, normalise, scale, score
from moe_conformance.workloads.records.runs import RouterStep
from moe_conformance.workloads.records.workload import Workload

_STRATEGIES = {
    "random": "logits are drawn anew for every forward",
    "bias": "a bias of each expert is drawn for every forward",
    "kept bias": "a bias is drawn once, and kept by the router",
    "round_robin": "ids are dealt in turn: nothing is drawn",
}
_FORCED = {"random": ("random", None), "bias": ("biased", 0.5), "kept bias": ("biased", -2.0)}
_SIZES = {"even": (24,), "uneven": (26, 15, 22, 19), "rank without": (14, 0, 18, 9)}


def _strategy(workload: Workload) -> str:
    (strategy, parameter), *others = workload.config.routing.forced
    if others or strategy not in ("random", "biased", "round_robin"):
        return ""
    return strategy if strategy != "biased" else "kept bias" if (parameter or 0.0) < 0 else "bias"


_OPTIONS = (
    readers.layout({name: LAYOUTS[name] for name in ("single", "ep2", "tp2-ep2-edp2")}),
    readers.dtype(),
    readers.top_k(),
    score(),
    normalise(),
    scale(),
    balance_bias(),
    groups(),
    Option("strategy", _STRATEGIES, _strategy),
    readers.schedule("one", "in flight", "inference"),
    Option("tokens", {name: TOKENS[name] for name in _SIZES}, readers.tokens().read),
)
_RULES = (
    Rule({"layout": ("single",), "tokens": ("uneven", "rank without")}, "one rank has no others"),
    Rule(
        {"groups": ("max", "topk_sum"), "top_k": ("1",)},
        "the best expert is in the best group: a limit changes nothing",
    ),
)


def _make(name: str, row: Row, layout: Layout) -> Workload:
    strategy, parameter = _FORCED.get(row["strategy"], (row["strategy"], None))
    recipe = ForcingRecipe(name, strategy, parameter, config_of(row), _SIZES[row["tokens"]], SCHEDULED[row["schedule"]])
    return forcing_workload(recipe, "default", layout)


SURFACES = (Surface("forcing", (RouterStep(forced="routes"),), _OPTIONS, _RULES, _make, first_variant=True),)
