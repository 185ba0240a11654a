"""The options of permute and unpermute, and scripts of their pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_conformance.chapters.permute import workloads
from moe_conformance.chapters.permute.workloads import Ids, Permute
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.pairs import readers
from moe_conformance.workloads.pairs.options import Option, Row, Rule, Surface
from moe_conformance.workloads.pairs.readers import NO, YES, sizes_of
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Workload

_TOKENS = {
    "none": "no row at all",
    "one": "dimensions of 1",
    "few": "several experts have few rows",
    "many": "every expert has more rows than a block of a kernel",
}
_NUMBERS = {"none": 0, "one": 1, "few": 13, "many": 300}
_SLOTS: Mapping[str, tuple[Ids, str]] = {
    "full": (workloads.anywhere, "every slot is routed"),
    "some empty": (workloads.empty_slots, "some slots, and all of a token, are empty: no row is made for them"),
    "all empty": (workloads.all_empty, "no token has a row"),
    "twice": (workloads.twice, "an expert is in two slots of a token: a dense map holds it once"),
}
_MULTIPLES = {
    "1": "segments follow each other",
    "3": "a multiple that is no power of two",
    "16": "of fp8 and of grouped products",
    "128": "of blocks of kernels: more padding than rows",
}


def _ids(workload: Workload) -> Tensor:
    ids_TK: Tensor = workload.calls[0].given[0]["routing"].ids_TK
    return ids_TK


def _slots(workload: Workload) -> str:
    ids_TK = _ids(workload)
    if len(ids_TK) and not bool((ids_TK >= 0).any()):
        return "all empty"
    if bool((ids_TK < 0).any()):
        return "some empty"
    ranked_TK = ids_TK.sort(1).values
    return "twice" if bool((ranked_TK[:, 1:] == ranked_TK[:, :-1]).any()) else "full"


def _tokens(workload: Workload) -> str:
    T = len(_ids(workload))
    return "none" if not T else "one" if T == 1 else "few" if T < 64 else "many"


_OPTIONS = (
    readers.dtype(),
    readers.top_k(),
    readers.experts(),
    readers.hidden(),
    Option("tokens", _TOKENS, _tokens),
    Option("slots", {name: why for name, (_, why) in _SLOTS.items()}, _slots),
    Option("multiple", _MULTIPLES, lambda workload: str(workload.config.padding.row_multiple)),
    readers.yes("strided", "tokens are a transposed view", lambda w: not w.calls[0].given[0]["x_TD"].is_contiguous()),
)
_RULES = (
    Rule({"tokens": ("none",), "slots": ("some empty", "all empty", "twice")}, "no token has a slot"),
    Rule({"tokens": ("one",), "slots": ("some empty",)}, "the only token would have no slot at all"),
    Rule({"top_k": ("1",), "slots": ("twice",)}, "one slot holds no expert twice"),
    Rule({"tokens": ("none", "one"), "strided": (YES,)}, "so few elements have no order"),
    Rule({"experts": ("odd per rank",), "top_k": ("10",)}, "of 13 experts every token has nearly all"),
)


def _make(name: str, row: Row, layout: Layout) -> Workload:
    config: dict[str, Any] = {
        **sizes_of(row),
        "padding.row_multiple": int(row["multiple"]),
    }
    recipe = Permute(name, _SLOTS[row["slots"]][0], _NUMBERS[row["tokens"]], config, row["strided"] != NO)
    return workloads.permutation(recipe, "default", layout)


SURFACES = (Surface("permute", (Script("permutation"),), _OPTIONS, _RULES, _make, first_variant=True),)
