"""Tokens per expert and the trace of choices by hand, one slot at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from self_tests.chapters.overload.second.factors import Bools, Ints, Label, demand


class RoutedPass(NamedTuple):
    """One pass of one layer for one microbatch: what it was (as in a timeline), and the ids dispatch was handed."""

    kind: str
    label: Label
    ids_TK: Ints
    padding_T: Bools | None = None


def check_pass(one: RoutedPass) -> None:
    """Ids are int64 (T, K), padding is bool (T,)."""
    demand(one.ids_TK.ndim == 2 and one.ids_TK.dtype == np.int64, "ids are not int64 (T, K)")
    if one.padding_T is not None:
        demand(
            one.padding_T.dtype == np.bool_ and one.padding_T.shape == one.ids_TK.shape[:1], "padding is not bool (T,)"
        )


def expert_counts(passes: Sequence[RoutedPass], experts: int) -> list[int]:
    """Pairs of each expert over the training passes, each counted once; padding is not even looked at."""
    demand(experts >= 1, f"{experts} experts")
    totals = [0] * experts
    for one in passes:
        check_pass(one)
        if one.kind not in ("forward", "alone"):
            continue
        for token, ids in enumerate(one.ids_TK.tolist()):
            if one.padding_T is not None and one.padding_T[token]:
                continue
            for expert in ids:
                demand(-1 <= expert < experts, f"expert {expert} of {experts}")
                if expert != -1:
                    totals[expert] += 1
    return totals


def trace(passes: Sequence[RoutedPass]) -> dict[Label, list[set[int]]]:
    """The set of experts of each token, under the label of its forward; repeats and backwards add nothing."""
    records: dict[Label, list[set[int]]] = {}
    for one in passes:
        if one.kind in ("recomputed", "backward"):
            continue
        demand(one.label not in records, f"{one.label} recorded twice")
        records[one.label] = [{expert for expert in ids if expert >= 0} for ids in one.ids_TK.tolist()]
    return records
