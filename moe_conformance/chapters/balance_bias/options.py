"""The options of routers whose balance bias is updated, and scripts of their pairs."""

from __future__ import annotations

from typing import Any

from moe_conformance.chapters.balance_bias.workloads import Recipe, Step, script
from moe_conformance.contract import Balance
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import DTYPES, LAYOUTS, NO, YES
from moe_conformance.workloads.pairs.router import normalise, score
from moe_conformance.workloads.records.runs import ON_BALANCING_ROUTERS
from moe_conformance.workloads.records.workload import Workload

_LAYOUTS = {
    **{name: LAYOUTS[name] for name in ("single", "ep2", "tp2-ep2-edp2")},
    "tp2-cp2-edp4": "loads of tp and cp ranks are summed too",
    "pp2-ep2": "stages have other layers: loads are not summed over them",
}
_FORCED = {NO: "routers select", "random": "by random logits", "round_robin": "in turn: loads are equal"}
_DROPS = {
    NO: "no slot is dropped",
    "dropped": "loads count selected slots",
    "padded": "rows are padded to the capacity",
}
_RULES_OF = {"sign": "a rate is added or subtracted", "quantile": "biases are set from scores of the step's tokens"}


def _drops(workload: Workload) -> str:
    capacity = workload.config.capacity
    return NO if capacity.factor is None else "padded" if capacity.padded else "dropped"


def _forced(workload: Workload) -> str:
    forced = workload.config.routing.forced
    return forced[0][0] if forced else NO


_OPTIONS = (
    readers.layout(_LAYOUTS),
    readers.dtype("float32", "bfloat16", "float16"),
    readers.top_k("1", "2", "3", "5", "6"),
    Option("rule", _RULES_OF, lambda workload: workload.config.balance.rule),
    readers.yes("recompute", "a router that runs again counts once", lambda w: w.config.balance.recompute),
    Option(
        "layers",
        {"1": "one router", "2": "two, behind a dense layer, each with its own loads"},
        lambda workload: str(workload.config.balance.layers),
    ),
    score(),
    normalise(),
    readers.mask(),
    Option(
        "microbatches",
        {"1": "one in a step", "2": "loads of a step add up"},
        readers.microbatches().read,
    ),
    readers.modes(),
    Option("capacity", _DROPS, _drops),
    Option("forced", _FORCED, _forced),
)
_RULES = (
    Rule({"layout": ("single",), "mask": ("one rank",)}, "no token would be left"),
    Rule({"rule": ("quantile",), "forced": ("random", "round_robin")}, "quantiles are of scores that select nothing"),
    Rule({"rule": ("quantile",), "capacity": ("dropped", "padded")}, "biases share all slots out, so that none drops"),
    Rule({"rule": ("quantile",), "dtype": ("bfloat16", "float16")}, "tokens are equal there, and so are all quantiles"),
)


def _make(name: str, row: Row, layout: Layout) -> Workload:
    layers, m = int(row["layers"]), int(row["microbatches"])
    balance = Balance(
        row["rule"],  # type: ignore[arg-type]
        2.0**-5 if row["dtype"] == "float32" else 0.001,
        row["recompute"] == YES,
        layers,
        layers - 1,
    )
    options: dict[str, Any] = {"experts": 12, "hidden": 24, "top_k": int(row["top_k"]), "dtype": DTYPES[row["dtype"]]}
    options |= {"routing.score": row["score"], "routing.normalise": row["normalise"] == YES}
    if row["capacity"] != NO:
        options |= {"capacity.factor": 0.75, "capacity.padded": row["capacity"] == "padded"}
    if row["forced"] != NO:
        options["routing.forced"] = ((row["forced"], None),)
    modes = () if row["modes"] == NO else (row["modes"], row["modes"])
    steps = tuple(Step(m, 1, row["mask"], modes, seed) for seed in range(2))  # type: ignore[arg-type]
    # Megatron-Core takes as many tokens as the experts have equal shares of: 12 of each rank.
    positions = 6 if row["rule"] == "quantile" else None
    return script(Recipe(name, steps, balance, options, positions=positions), "default", layout)


SURFACES = (Surface("bias", (ON_BALANCING_ROUTERS,), _OPTIONS, _RULES, _make, first_variant=True),)
