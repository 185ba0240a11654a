"""The options of routers with losses, and scripts of their pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_conformance.chapters.losses.workloads import Recipe, Step, script
from moe_conformance.contract import Config, Losses
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import DTYPES, LAYOUTS, NO, YES
from moe_conformance.workloads.pairs.router import balance_bias, normalise, score
from moe_conformance.workloads.records.runs import ON_TRAINING_ROUTERS
from moe_conformance.workloads.records.workload import Workload

_LOSSES = {
    "auxiliary": Losses(auxiliary=0.5),
    "sequence": Losses(sequence=0.5),
    "global_batch": Losses(global_batch=0.5),
    "first_choice": Losses(first_choice=0.5),
    "z": Losses(z=0.25),
    "several": Losses(auxiliary=0.3, sequence=0.7, global_batch=0.45, z=0.06),
}
_WHY = {
    "auxiliary": "of a microbatch",
    "sequence": "of each sequence, whose parts tp and cp ranks hold",
    "global_batch": "counts are those of the step so far, over all data parallel ranks",
    "first_choice": "counts first choices alone (GShard)",
    "z": "of logits, without counts",
    "several": "four together, each divided by its own number",
}
_LAYOUTS = {
    **{name: LAYOUTS[name] for name in ("single", "ep2", "tp2-ep2-edp2")},
    "tp2-cp2-edp4": "tp and cp ranks hold parts of a sequence",
    "cp2-ep2-edp2": "cp ranks hold parts of a sequence; dp is not dp x cp",
}


def _loss(workload: Workload) -> str:
    losses = workload.config.losses
    found = [name for name in _LOSSES if name != "several" and getattr(losses, name)]
    return found[0] if len(found) == 1 else "several" if len(found) > 1 else ""


def _uneven(workload: Workload) -> bool:
    sizes = {len(batch.x[0]) for call in workload.calls for given in call.given for batch in given.get("batches", ())}
    return len(sizes) > 1


_OPTIONS = (
    readers.layout(_LAYOUTS),
    readers.dtype("float32", "bfloat16", "float16"),
    readers.top_k("1", "2", "3", "5", "6"),
    Option("loss", _WHY, _loss),
    readers.yes("per_token", "gradients are divided by the tokens of the step", lambda w: w.config.losses.per_token),
    readers.yes("recompute", "a router that runs again counts and adds once", lambda w: w.config.losses.recompute),
    Option(
        "layers",
        {"1": "one router", "2": "two, behind a dense layer: reports are means over layers with a router"},
        lambda workload: str(workload.config.losses.layers),
    ),
    score(),
    normalise(),
    balance_bias(),
    readers.mask(),
    readers.microbatches(),
    readers.modes(),
    readers.yes("uneven", "data parallel groups have different numbers of tokens", _uneven),
    readers.yes(
        "capacity", "slots are dropped: losses count those that were selected", lambda w: w.config.capacity.factor
    ),
)
_RULES = (
    Rule({"layout": ("single", "tp2-cp2-edp4"), "uneven": (YES,)}, "there is one data parallel group"),
    Rule({"layout": ("single", "ep2"), "mask": ("one rank",)}, "a group of one rank would have no token"),
    Rule({"dtype": ("bfloat16", "float16"), "balance_bias": (YES,)}, "rounding decides selections by biased scores"),
    Rule({"dtype": ("bfloat16", "float16"), "capacity": (YES,)}, "rounding decides what is dropped"),
)


def _make(name: str, row: Row, layout: Layout) -> Workload:
    losses = replace(
        _LOSSES[row["loss"]],
        per_token=row["per_token"] == YES,
        recompute=row["recompute"] == YES,
        layers=int(row["layers"]),
        dense_layers=int(row["layers"]) - 1,
    )
    options: dict[str, Any] = {"routing.score": row["score"], "routing.normalise": row["normalise"] == YES}
    options |= {"routing.balance_bias": row["balance_bias"] == YES, "top_k": int(row["top_k"])}
    options |= {"dtype": DTYPES[row["dtype"]]} | ({"capacity.factor": 0.5} if row["capacity"] == YES else {})
    padding = "asymmetric" if row["mask"] == "end" else row["mask"]
    modes = () if row["modes"] == NO else (row["modes"], row["modes"])
    m = int(row["microbatches"])
    # Weights are then divided by a sum over slots that ids do not name once they are dropped: losses alone are judged.
    untold = row["capacity"] == YES and (row["normalise"] == YES or row["score"] == "softmax_topk")
    steps = tuple(
        Step(m, padding, upstream=upstream, overlapped=m > 1, modes=modes)  # type: ignore[arg-type]
        for upstream in ((0.0, 0.0) if untold else (1.0, 0.5))
    )
    recipe = Recipe(name, losses, steps, uneven=row["uneven"] == YES)
    config = Config(experts=12, hidden=24, losses=losses)
    return script(recipe, config.changed(options), layout)


SURFACES = (Surface("losses", (ON_TRAINING_ROUTERS,), _OPTIONS, _RULES, _make, first_variant=True),)
