"""The goldens of overload are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from self_tests.chapters.overload.second import counters, factors, timelines
from self_tests.goldens.golden_twins import assert_twins, given, stored, told

HALF, OTHER = [0, 1, 2], [3, 4, 5]
GROUPS: Mapping[str, tuple[int, list[list[int]], list[list[int]]]] = {
    "ep2": (2, [HALF, OTHER], []),
    "ep2-etp2": (2, [HALF, HALF, OTHER, OTHER], []),
    "ep2-etp2-copies": (2, [HALF, OTHER, HALF, OTHER], [[0, 1]]),
    "ep3-uneven": (3, [[5], [0, 3, 2], [1, 4]], []),
    "one-rank": (1, [[0, 1, 2, 3, 4, 5]], []),
    "no-tokens": (2, [HALF, OTHER], []),
}
KINDS = ["forward", "recomputed", "backward", "alone", "evaluation"]
CHOICES = [(late, alone) for late in ("first", "repeated") for alone in ("counted", "left_out")]


def ratio(value: Fraction) -> list[int]:
    """A fraction as it is stored."""
    return [value.numerator, value.denominator]


def of_entries(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pairs, balanced counts and factors of every group, and tokens that are brought."""
    found = {}
    for case, (ep, held, copies) in GROUPS.items():
        own, ranks = given(values, case), range(len(held))
        masks = [own.get(f"padding_T-{rank}") for rank in ranks]
        padding = [mask if mask is None else mask.astype(bool) for mask in masks]
        group = factors.Group([own[f"ids_TK-{rank}"] for rank in ranks], held, ep, padding, copies)
        entry = factors.entry(group)
        answers = {"balanced": ratio(entry.balanced), "factor": ratio(factors.factor(entry))}
        found |= told(case, answers | {"pairs_W": entry.pairs})
    padding_SB = given(values, "brought")["padding_SB"].astype(bool)
    shapes = [((3, 5), padding_SB), ((15,), padding_SB.reshape(-1)), ((3, 5), None), ((2, 0), None), ((), None)]
    return found | told("brought", {"tokens_N": [factors.tokens_brought(*each) for each in shapes]})


def rows_of(report: tuple[dict[str, Fraction], set[str]]) -> list[list[int]]:
    """A report as it is stored."""
    kinds = {"moe/avg_overload_factor": 0, "moe/max_overload_factor": 1, "moe/max_cum_overload_factor": 2}
    rows = []
    for name, value in report[0].items():
        start, _, layer = name.partition("_layer_")
        rows.append([int(layer or -1), kinds[start], *ratio(value), int(name in report[1])])
    return sorted(rows)


def of_reports(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reports of every stage, their rounding, and how they end."""
    own = {name: value.tolist() for name, value in given(values, "entries").items()}
    entries = [
        factors.Entry(stage, None if layer < 0 else layer, tuple(pairs), Fraction(2 * tokens, 2))
        for stage, layer, pairs, tokens in zip(
            own["stage_N"], own["layer_N"], own["pairs_NW"], own["tokens_N"], strict=True
        )
    ]
    found = told("reported-of-nothing", {"rows_N5": rows_of(factors.reported([], 0, None, "zero", "moe/"))})
    for stage in range(3):
        for empty in ("zero", "left_out"):
            for which, peak in (("with", Fraction(5, 4)), ("without", None)):
                report = factors.reported(entries, stage, peak, empty, "moe/")
                found |= told(f"reported-{stage}-{empty}-{which}", {"rows_N5": rows_of(report)})
    exact = [
        (Fraction(3, 2), 4, 1),
        (Fraction(-1, 3), 0, 2),
        (Fraction(0), 9, 1),
        (Fraction(7, 5), 100, Fraction(9, 4)),
    ]
    found |= told("errors", {"allowed_N2": [ratio(factors.allowed_error(x, n, Fraction(g))) for x, n, g in exact]})
    worlds = [
        ["ab", "ba", "cd", "cd", "ef", "ef"],
        ["a", "b", "c", "c", "d", "d"],
        ["ab", "ab", "c", "c", "d", "d"],
        [""] * 6,
        ["aa", "a", "b", "bb", "", ""],
    ]
    codes, groups = {"values": 0, "either": 1, "error": 2}, [[0, 1], [2, 3], [4, 5]]
    stages = ([0] * 6, [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2])
    ends = [[[codes[end] for end in factors.ends(world, groups, each)] for each in stages] for world in worlds]
    return found | told("ends", {"ends_NSW": ends})


def of_time(values: Mapping[str, Any]) -> dict[str, Any]:
    """Timelines and peaks of every rank, and what they make of the world."""
    found, choices, pairs, balanced = {}, [], [], []
    for rank in range(3):
        own = given(values, f"time-{rank}")
        passes = [(KINDS[kind], label) for kind, label in own["passes_P2"].tolist()]
        pairs.append(dict(enumerate(own["pairs_L"].tolist())))
        balanced.append(
            {label: Fraction(top, bottom) for label, (top, bottom) in enumerate(own["balanced_L2"].tolist())}
        )
        choices.append(timelines.legal_timelines(passes))
        answers: dict[str, Any] = {}
        for word, expected in (("", [0, 1, 2, 3, 4, 9]), ("-strangers", [])):
            wrong = timelines.miscounted(passes[:-2], expected)
            answers[f"miscounted{word}_N3"] = sorted([label, *counts] for label, counts in wrong.items())
        for late, alone in CHOICES:
            events = timelines.timeline(passes, late, alone)
            P, Q = timelines.peaks(events, pairs[rank], balanced[rank])
            answers[f"events_J2-{late}-{alone}"] = np.array(events, dtype=np.int64).reshape(-1, 2)
            answers[f"peaks_3-{late}-{alone}"] = [int(P), *ratio(Q)]
        answers["lengths_N"] = [len(events) for events in choices[rank]]
        found |= told(f"time-{rank}", answers)
    world = ([of_rank[0] for of_rank in choices], pairs, balanced)
    idle = ([[], []], pairs[:2], balanced[:2])
    worst = timelines.cumulative(*world)
    assert worst is not None
    still = timelines.legal_cumulatives([[[]]], pairs[:1], balanced[:1])
    answers = {
        "legal-where-nothing-runs_N2": [ratio(value) for value in still],
        "cumulative": ratio(worst),
        "none-where-nothing-runs": timelines.cumulative(*idle) is None,
        "interval_22": [ratio(end) for end in timelines.cumulative_interval(*world)],
        "interval-where-nothing-runs_22": [ratio(end) for end in timelines.cumulative_interval(*idle)],
        "legal_N2": [ratio(value) for value in timelines.legal_cumulatives(choices, pairs, balanced)],
    }
    return found | told("world", answers)


def of_logs(values: Mapping[str, Any]) -> dict[str, Any]:
    """What reports cover, orders of what runs at the same time, and counters."""
    words = {5: "report", 6: "abandon"}
    lines = [words.get(kind) or (KINDS[kind], label) for kind, label in given(values, "log")["lines_N2"].tolist()]
    reports = timelines.since_reports(lines)
    covered = [[n, KINDS.index(kind), label] for n, passes in enumerate(reports) for kind, label in passes]
    blocks = [
        [[("forward", 0), ("forward", 1)]],
        [[("forward", 2), ("backward", 2)], [("backward", 1), ("recomputed", 0)], []],
        [[("backward", 0)]],
    ]
    orders = [[[KINDS.index(kind), label] for kind, label in order] for order in timelines.merges(blocks)]
    own = given(values, "counters")
    passes = [
        counters.RoutedPass(kind, n, own["ids_PTK"][n], own["padding_PT"][n].astype(bool) if n else None)
        for n, kind in enumerate([*KINDS, "forward"])
    ]
    answers = {"counts_E": counters.expert_counts(passes, 5), "counts-of-nothing_E": [0] * 5}
    for label, record in counters.trace(passes).items():
        answers[f"record_TE-{label}"] = [[e in chosen for e in range(5)] for chosen in record]
    log = told("log", {"reports": len(reports), "covered_N3": covered})
    return log | told("merged", {"orders_NP2": sorted(orders)}) | told("counters", answers)


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored count, factor, report and timeline."""
        values = stored("overload")
        assert_twins("overload", of_entries(values) | of_reports(values) | of_time(values) | of_logs(values))
