"""The options of load meters and scripts of their pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.chapters.overload.workloads.drawn import METER, Drawn, Passes, Recipe, flat, in_two, workload
from moe_conformance.contract import MeteredPass
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import LAYOUTS, LEADS, NO, TOKENS, YES, sizes_of
from moe_conformance.workloads.records.workload import Workload

_LAYOUTS = {
    **{name: LAYOUTS[name] for name in ("single", "ep2", "ep2-edp2", "ep2-etp2")},
    "pp2-ep2": "stages have other layers, and their reports are of the whole model",
}
_ORDERS = {
    "one by one": "one entry in flight at a time: the peak is the largest factor",
    "forwards first": "all entries are in flight together",
    "1F1B": "the peak comes after a backward that takes an entry back",
}
_SLOTS = {
    "full": "every slot is routed",
    "some empty": "dropped pairs are on no rank, and their tokens in the balanced share",
    "few experts": "most experts get no row, and some rank may get none",
}
_BESIDE = {
    NO: "training alone",
    "evaluation": "forwards in evaluation lie between: they are no load",
    "alone": "training forwards without a backward lie between: they are never in flight later",
}
_MICROBATCHES = 3
_ORDERED = {"one by one": "F0 B0 F1 B1 F2 B2", "forwards first": "F0 F1 F2 B0 B1 B2", "1F1B": "F0 F1 B0 F2 B1 B2"}
_SIZES = {"even": (8, 8, 8, 8), "uneven": (10, 4, 12, 6), "rank without": (8, 0, 10, 4), "one token": (1, 1, 1, 1)}


def _passes(workload: Workload) -> list[Passes]:
    """Return the passes of the first step, by rank."""
    return [given["passes"] for given in workload.calls[0].given]


def _forwards(workload: Workload, *kinds: str) -> list[MeteredPass]:
    return [each for passes in _passes(workload) for each in passes if each.kind in (kinds or ("forward",))]


def _order(workload: Workload) -> str:
    kinds = [each.kind for each in _passes(workload)[0] if each.kind in ("forward", "backward")]
    turns = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    microbatches = {each.microbatch for each in _forwards(workload)}
    if len(turns) == 2 * len(microbatches):
        return "one by one"
    return "forwards first" if len(turns) == 2 else "1F1B" if len(turns) > 2 else ""


def _tokens(workload: Workload) -> str:
    sizes = [
        {len(each.ids_TK) for each in passes if each.kind == "forward" and each.ids_TK is not None}
        for passes in _passes(workload)
    ]
    every = set().union(*sizes)
    if 0 in every:
        return "rank without"
    if len(every) > 1:
        return "uneven"
    return "one token" if every == {1} else "even" if every else ""


def _routed(forward: MeteredPass) -> Tensor:
    """Return the slots of tokens that are no padding."""
    assert forward.ids_TK is not None
    assert forward.padding_T is not None
    return forward.ids_TK[~forward.padding_T]


def _slots(workload: Workload) -> str:
    ids = [_routed(each) for each in _forwards(workload)]
    if any(bool((each < 0).any()) for each in ids):
        return "some empty"
    reached = max((int(each.max()) for each in ids if each.numel()), default=0)
    return "few experts" if reached <= workload.config.top_k else "full"


def _beside(workload: Workload) -> str:
    found = {each.kind for each in _forwards(workload, "evaluation", "alone")}
    return NO if not found else found.pop() if len(found) == 1 else ""


_OPTIONS = (
    readers.layout(_LAYOUTS),
    readers.dtype("float32", "bfloat16", "float16"),
    readers.top_k("1", "2", "3", "5", "6", "10"),
    readers.experts(),
    readers.hidden(),
    Option("tokens", {name: TOKENS[name] for name in _SIZES}, _tokens),
    Option("order", _ORDERS, _order),
    Option("slots", _SLOTS, _slots),
    Option("beside", _BESIDE, _beside),
    Option(
        "lead", LEADS, lambda w: "two_dims" if any(e.x is not None and e.x.dim() > 2 for e in _forwards(w)) else "flat"
    ),
    readers.yes("recompute", "forwards run again: they count once", lambda w: any(e.recomputed for e in _forwards(w))),
    readers.yes(
        "padding",
        "padding tokens are no load, and not in the balanced share",
        lambda w: any(e.padding_T is not None and bool(e.padding_T.any()) for e in _forwards(w)),
    ),
)
_RULES = (
    Rule({"layout": ("single",), "tokens": ("uneven", "rank without")}, "one rank has no others"),
    Rule({"tokens": ("one token",), "lead": ("two_dims",)}, "one token is no two columns"),
    Rule({"tokens": ("one token",), "slots": ("some empty",)}, "the only token would have no slot at all"),
    Rule({"tokens": ("one token",), "padding": (YES,)}, "the only token would be padding"),
)


def _shows(row: Row) -> tuple[str, ...]:
    words = {
        "padding": row["padding"] == YES,
        "recomputation": row["recompute"] == YES,
        "dropped pairs": row["slots"] == "some empty",
        "evaluation": row["beside"] == "evaluation",
        "no backward": row["beside"] == "alone",
        "forms of tokens": row["lead"] == "two_dims",
    }
    return ("schedules", *(word for word, shown in words.items() if shown))


def _step(row: Row, drawn: Drawn) -> Passes:
    """Return three microbatches through the layers of a stage, in the order of the row."""
    forwards = [_microbatch(row, drawn, m) for m in range(_MICROBATCHES)]
    found: list[MeteredPass] = []
    for turn in _ORDERED[row["order"]].split():
        m = int(turn[1])
        if turn[0] == "F":
            found += forwards[m]
        else:
            found += [MeteredPass("backward", layer, m) for layer in reversed(drawn.layers)]
        if turn == "F1" and row["beside"] != NO:
            found += [drawn.forward(layer, 7, row["beside"], drawn.ids(6)) for layer in drawn.layers]
    return tuple(found)


def _microbatch(row: Row, drawn: Drawn, m: int) -> Passes:
    T = _SIZES[row["tokens"]][drawn.rank]
    padding_T = (torch.arange(T) >= T - T // 3) & (row["padding"] == YES)
    found = []
    for layer in drawn.layers:
        ids_TK = drawn.ids(T, within=drawn.config.top_k + 1 if row["slots"] == "few experts" else None)
        if row["slots"] == "some empty":
            ids_TK[::3, 0], ids_TK[1:2] = -1, -1
        ids_TK[padding_T] = -1
        lead = in_two if row["lead"] == "two_dims" else flat
        found.append(drawn.forward(layer, m, "forward", ids_TK, padding_T, lead, recomputed=row["recompute"] == YES))
    return tuple(found)


def _one(drawn: Drawn) -> Passes:
    return drawn.forward(drawn.layers[0], 0, ids_TK=drawn.ids(5)), MeteredPass("backward", drawn.layers[0])


def _make(name: str, row: Row, layout: Layout) -> Workload:
    config = sizes_of(row, layout.ep)
    return workload(name, Recipe((lambda drawn: _step(row, drawn), _one), config, shows=_shows(row)), "default", layout)


SURFACES = (Surface("load", (METER,), _OPTIONS, _RULES, _make, first_variant=True),)
