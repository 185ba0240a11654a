"""The options of routers, of which every three values are to meet, and their workloads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import DTYPES, NO, SCHEDULED, YES
from moe_conformance.workloads.records.runs import RouterStep
from moe_conformance.workloads.records.workload import Twist, Workload
from moe_conformance.workloads.routers import RouterRecipe, router_workload

SCORES = {
    "softmax": "over all experts, before the selection",
    "softmax_topk": "over the selected logits",
    "sigmoid": "of each logit alone",
    "sqrtsoftplus": "not bounded by 1",
}
_GROUPS = {
    NO: "every expert may be selected",
    "top2_sum": "of the best groups, by the sum of their two best (DeepSeek-V3)",
    "topk_sum": "by the sum of their best K / groups",
    "max": "by their best (DeepSeek-V2)",
}
_TOKENS = {
    "usual": "selections are apart by more than rounding",
    "ties": "pairs of experts have the same logits: any of them is right, and the same one again",
    "large": "logits of hundreds: exponentials overflow where no maximum is subtracted",
}
_SPAN = 24  # a size that ends what is large: tokens have entries of about 64 there, and of 1 elsewhere


def score() -> Option:
    """Return the option of the score function."""
    return Option("score", SCORES, lambda workload: workload.config.routing.score)


def normalise() -> Option:
    """Return the option of normalisation."""
    why = "weights are divided by their sum: another gradient"
    return readers.yes("normalise", why, lambda workload: workload.config.routing.normalise)


def balance_bias() -> Option:
    """Return the option of the balance bias."""
    why = "selection by other values than the weights"
    return readers.yes("balance_bias", why, lambda workload: workload.config.routing.balance_bias)


def scale() -> Option:
    """Return the option of the scale of weights."""
    why = "weights times 2.5, once, normalised or not"
    return readers.yes("scale", why, lambda workload: workload.config.routing.scale != 1)


def groups() -> Option:
    """Return the option of the limit of groups, by their score."""

    def read(workload: Workload) -> str:
        routing = workload.config.routing
        if not routing.groups:
            return NO
        K, chosen = workload.config.top_k, routing.groups[1]
        return routing.group_score or ("top2_sum" if chosen <= K else "")

    return Option("groups", _GROUPS, read)


def wide() -> Option:
    """Return the option of the dtype in which a router computes."""
    why = "logits, scores and weights in a wider dtype than the tokens"
    return readers.yes("wide", why, lambda workload: workload.config.router_dtype is not None)


def gate_bias() -> Option:
    """Return the option of a bias of logits."""
    return readers.yes(
        "gate_bias", "a bias that selects, weighs and trains", lambda workload: workload.config.gate_bias
    )


def _kind(workload: Workload) -> str:
    weight_ED = workload.parameters["router", None]
    if len(weight_ED) % 2 == 0 and torch.equal(weight_ED[::2], weight_ED[1::2]):
        return "ties"
    large = max((float(b.x_TD.abs().max()) for ranks in workload.batches for b in ranks if b.x_TD.numel()), default=0.0)
    return "large" if large > _SPAN else "" if large == 0 else "usual"


_OPTIONS = (
    readers.layout({"single": readers.LAYOUTS["single"], "ep2": "gradients of the router are reduced"}),
    readers.dtype(),
    readers.top_k(),
    score(),
    normalise(),
    scale(),
    balance_bias(),
    groups(),
    gate_bias(),
    wide(),
    Option("logits", _TOKENS, _kind),
    readers.schedule("one", "in flight", "inference"),
    readers.tokens(),
    readers.recompute(),
)
_HALF = ("bfloat16", "float16")
_RULES = (
    Rule({"layout": ("single",), "tokens": ("uneven",)}, "one rank has no others"),
    Rule({"layout": ("single",), "tokens": ("rank without",), "schedule": ("one",)}, "no token would be there at all"),
    Rule({"tokens": ("changing",), "schedule": ("one",)}, "one microbatch has one number of tokens"),
    Rule({"tokens": ("changing",), "layout": ("ep2",)}, "uneven tokens change between microbatches too"),
    Rule({"dtype": ("float64",), "wide": (YES,)}, "no dtype is wider than float64"),
    Rule(
        {"groups": ("max", "topk_sum"), "top_k": ("1",)},
        "the best expert is in the best group: a limit changes nothing",
    ),
    Rule({"logits": ("ties",), "top_k": ("2", "6", "10")}, "an even K takes both experts of a pair"),
    Rule({"logits": ("ties",), "balance_bias": (YES,)}, "biases of experts differ, so that none tie"),
    Rule({"logits": ("ties",), "gate_bias": (YES,)}, "biases of experts differ, so that none tie"),
    Rule({"logits": ("ties",), "groups": ("top2_sum", "topk_sum", "max")}, "pairs lie within a group, which is whole"),
    Rule({"logits": ("large",), "balance_bias": (YES,), "score": ("softmax", "softmax_topk")}, "logits alone decide"),
    Rule({"logits": ("large",), "balance_bias": (YES,), "dtype": _HALF}, "rounding of large logits leaves all open"),
    Rule({"logits": ("large",), "groups": ("top2_sum", "topk_sum", "max"), "dtype": _HALF}, "as for biases"),
    Rule({"tokens": ("one token",), "groups": ("top2_sum", "topk_sum", "max")}, "too few to show a limit"),
    Rule({"tokens": ("one token",), "balance_bias": (YES,)}, "too few to show that a bias selects"),
)


def config_of(row: Row) -> dict[str, Any]:
    """Return the options of routing of a row, those that it has."""
    config: dict[str, Any] = {"top_k": int(row["top_k"]), "dtype": DTYPES[row["dtype"]], "routing.score": row["score"]}
    config["experts"] = 24 if row.get("groups", NO) != NO else 16
    config |= {"routing.normalise": row.get("normalise") == YES, "routing.balance_bias": row.get("balance_bias") == YES}
    config |= {"routing.scale": 2.5} if row.get("scale") == YES else {}
    config |= {"gate_bias": True} if row.get("gate_bias") == YES else {}
    if row.get("groups", NO) != NO:
        K = config["top_k"]
        chosen = 3 if K > 6 else 2 if K > 2 and K % 2 == 0 else 1
        config |= {"routing.groups": (4, chosen), "routing.group_score": row["groups"]}
    if row.get("wide") == YES:
        config["router_dtype"] = torch.float64 if row["dtype"] == "float32" else torch.float32
    return config


def _make(name: str, row: Row, layout: Layout) -> Workload:
    few = {"even": (32,), "uneven": (40, 24), "rank without": (40, 0), "changing": (40, 25), "one token": (1,)}
    recipe = RouterRecipe(
        name,
        config_of(row),
        few[row["tokens"]],
        SCHEDULED[row["schedule"]],
        magnitude=64.0 if row["logits"] == "large" else 1.0,
        bias=0.0,
        tied=row["logits"] == "ties",
    )
    made = router_workload(recipe, "default", layout)
    return made if row["recompute"] == NO else replace(made, twist=Twist(recomputed="all"))


SURFACES = (Surface("router", (RouterStep(),), _OPTIONS, _RULES, _make, together=3, first_variant=True),)
