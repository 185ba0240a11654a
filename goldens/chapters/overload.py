"""Golden of overload: entries, their factors, and reports of many; fractions are pairs of integers.

What is in flight at once, and counters of experts, are in `overload_timelines.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, named
from moe_conformance.goldens.chapters import overload_timelines
from moe_conformance.reference.overload import counters, factors, peaks, timelines
from moe_conformance.reference.overload import report as overload_report

_E, _K = 6, 2


@dataclass(frozen=True)
class _Group:
    """An exchange group: tokens by rank, whose second rank may copy the first, over how many its experts are spread."""

    tokens: Sequence[int]
    ep: int
    held: Sequence[Sequence[int]]
    copies: Sequence[Sequence[int]] = ()


_HALVES = ((0, 1, 2), (3, 4, 5))
_GROUPS: Mapping[str, _Group] = {
    "ep2": _Group((7, 4), 2, _HALVES),
    "ep2-etp2": _Group((5, 5, 0, 3), 2, (_HALVES[0], _HALVES[0], _HALVES[1], _HALVES[1])),
    "ep2-etp2-copies": _Group((5, 5, 4, 3), 2, (_HALVES[0], _HALVES[1], _HALVES[0], _HALVES[1]), ((0, 1),)),
    "ep3-uneven": _Group((3, 6, 2), 3, ((5,), (0, 3, 2), (1, 4))),
    "one-rank": _Group((6,), 1, (tuple(range(_E)),)),
    "no-tokens": _Group((0, 0), 2, _HALVES),
}
_EXACT: Sequence[tuple[Fraction, int, Mapping[str, Fraction]]] = (
    (Fraction(3, 2), 4, {}), (Fraction(-1, 3), 0, {"growth": Fraction(2)}), (Fraction(0), 9, {}),
    (Fraction(7, 5), 100, {"growth": Fraction(9, 4)}),
)  # fmt: skip
# What every rank recorded, a letter for each entry, with exchange groups of two; and the stages of the ranks.
_RECORDED = (
    ("ab", "ba", "cd", "cd", "ef", "ef"), ("a", "b", "c", "c", "d", "d"), ("ab", "ab", "c", "c", "d", "d"),
    ("", "", "", "", "", ""), ("aa", "a", "b", "bb", "", ""),
)  # fmt: skip
_STAGES = ((0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 1, 1), (0, 0, 1, 1, 2, 2))
_PAIRED = ((0, 1), (2, 3), (4, 5))
_ENDS = get_args(overload_report.End)


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return ids with dropped slots and padding of every group, and entries of three stages, the last without any."""
    found: dict[str, Tensor] = {}
    for case, group in _GROUPS.items():
        ids = [rng.integers(-1, _E, (T, _K)) for T in group.tokens]
        padding = [rng.random(T) < 0.2 for T in group.tokens]
        for first, *others in group.copies:
            for rank in others:
                ids[rank], padding[rank] = ids[first], padding[first]
        for rank in range(len(ids)):
            found |= named(case, "in", {f"ids_TK-{rank}": ids[rank]})
            if case != "one-rank":
                found |= named(case, "in", {f"padding_T-{rank}": padding[rank]})
    N = 14
    entries = {"stage_N": rng.integers(0, 2, N), "layer_N": rng.choice([-1, 0, 1, 3], N)}  # -1: the pass has no layer
    pairs_NW, tokens_N = rng.integers(0, 12, (N, 2)), rng.integers(1, 9, N)
    pairs_NW[::5], tokens_N[::5] = 0, 0
    return (
        found
        | named("entries", "in", {**entries, "pairs_NW": pairs_NW, "tokens_N": tokens_N})
        | overload_timelines.draw(rng)
    )


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return pairs, balanced counts and factors, reports in rows, errors that are allowed, and how reports end."""
    found: dict[str, Tensor] = {}
    for case, group in _GROUPS.items():
        drawn, ranks = given(inputs, case), range(len(group.tokens))
        padding = [drawn[f"padding_T-{rank}"].bool() for rank in ranks] if "padding_T-0" in drawn else None
        ids = [drawn[f"ids_TK-{rank}"] for rank in ranks]
        entry = oracle.entry(ids, group.held, ep=group.ep, padding_by_rank=padding, copies=group.copies)
        ratios = {"balanced": _ratio(entry.balanced), "factor": _ratio(oracle.factor(entry))}
        found |= named(case, "out", {"pairs_W": entry.pairs, **ratios})
    errors = [_ratio(oracle.allowed_error(exact, n, **how)) for exact, n, how in _EXACT]
    found |= named("errors", "out", {"allowed_N2": errors})
    ends = [
        [[_ENDS.index(end) for end in oracle.ends(recorded, _PAIRED, stages)] for stages in _STAGES]
        for recorded in _RECORDED
    ]
    return (
        found
        | named("ends", "out", {"ends_NSW": ends})
        | _reports(inputs, oracle)
        | overload_timelines.work_out(inputs, oracle)
    )


def _reports(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    drawn = {name: value.tolist() for name, value in given(inputs, "entries").items()}
    entries = [
        oracle.Entry(stage, None if layer < 0 else layer, tuple(pairs), Fraction(_K * tokens, 2))
        for stage, layer, pairs, tokens in zip(
            drawn["stage_N"], drawn["layer_N"], drawn["pairs_NW"], drawn["tokens_N"], strict=True
        )
    ]
    found = named("reported-of-nothing", "out", {"rows_N5": _rows([], 0, "zero", None, oracle)})
    for stage in range(3):
        for empty in get_args(overload_report.Empty):
            for peak in (Fraction(5, 4), None):
                case = f"reported-{stage}-{empty}-{'with' if peak else 'without'}"
                found |= named(case, "out", {"rows_N5": _rows(entries, stage, empty, peak, oracle)})
    return found


def _rows(
    entries: Sequence[factors.Entry], stage: int, empty: overload_report.Empty, peak: Fraction | None, oracle: Oracle
) -> list[list[int]]:
    """Report in rows: layer (-1: all), average, maximum or cumulative, the value, whether it may be absent."""
    report = oracle.reported(entries, stage, cumulative=peak, empty=empty, prefix="moe/")
    rows = []
    for name, value in report.values.items():
        words = name.removeprefix("moe/").split("_")  # avg overload factor layer 3, max cum overload factor
        layer = int(words[-1]) if "layer" in words else -1
        kind = 2 if "cum" in words else ("avg", "max").index(words[0])
        rows.append([layer, kind, *_ratio(value), int(name in report.may_be_absent)])
    return sorted(rows)


def _ratio(value: Fraction) -> tuple[int, int]:
    return value.numerator, value.denominator


_REQUIREMENTS = tuple(f"LOAD-{number:02}" for number in (*range(1, 19), 20, 23, 24, 25, 28, 29, 30))

_ORACLE = functions(factors, overload_report, timelines, peaks, counters)

CHAPTER = Chapter(2801, _REQUIREMENTS, _ORACLE, draw, work_out)
