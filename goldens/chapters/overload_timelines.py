"""The part of the golden of overload on time: timelines of passes, their peaks, and counters of experts.

A pass is stored as a row of its kind and its label, an event as its label and +1 or -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Oracle, given, named
from moe_conformance.reference.overload import peaks, timelines
from moe_conformance.reference.overload.timelines import Event, Kind, Pass

_KINDS: tuple[Kind, ...] = get_args(Kind)  # forward, recomputed, backward, alone, evaluation
_REPORT, _ABANDON = len(_KINDS), len(_KINDS) + 1  # in a log
_LIVES: Sequence[Sequence[Kind]] = (
    ("forward", "backward"), ("forward", "recomputed", "backward"), ("alone",), ("evaluation",),
    ("forward", "backward"), ("forward", "recomputed", "backward"),
)  # fmt: skip
_RANKS, _E, _K, _T = 3, 5, 2, 4


def draw(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return passes of every rank in an order of time, the last without any, with counts; a log; and routed passes."""
    found: dict[str, Tensor] = {}
    for rank in range(_RANKS):
        left = {label: list(life) for label, life in enumerate(_LIVES if rank < _RANKS - 1 else ())}
        order = rng.permutation([label for label, life in left.items() for _ in life]).tolist()
        passes = np.array([[_KINDS.index(left[label].pop(0)), label] for label in order], dtype=np.int64).reshape(-1, 2)
        counts = {"pairs_L": rng.integers(0, 20, len(_LIVES)), "balanced_L2": rng.integers(1, 9, (len(_LIVES), 2))}
        found |= named(f"time-{rank}", "in", {"passes_P2": passes, **counts})
    kinds = np.array([0, 2, 3, _REPORT, 0, 2, _ABANDON, 0, _REPORT, _REPORT, _ABANDON, 3, 1])
    found |= named("log", "in", {"lines_N2": np.stack([kinds, rng.integers(0, 9, len(kinds))], axis=1)})
    ids_PTK = rng.integers(-1, _E, (len(_KINDS) + 1, _T, _K))
    return found | named("counters", "in", {"ids_PTK": ids_PTK, "padding_PT": rng.random(ids_PTK.shape[:2]) < 0.25})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return timelines of every rank with their peaks, cumulative factors of the world, and counters."""
    found: dict[str, Tensor] = {}
    of_ranks: list[Sequence[Event]] = []
    pairs: list[peaks.Pairs] = []
    balanced: list[peaks.Balanced] = []
    for rank in range(_RANKS):
        drawn = given(inputs, f"time-{rank}")
        passes = _passes(drawn["passes_P2"])
        pairs.append(dict(enumerate(drawn["pairs_L"].tolist())))
        balanced.append({label: Fraction(*two) for label, two in enumerate(drawn["balanced_L2"].tolist())})
        of_ranks.append(oracle.timeline(passes))
        answers: dict[str, object] = {}
        for recomputed in get_args(timelines.Recomputed):
            for alone in get_args(timelines.Alone):
                events = oracle.timeline(passes, recomputed=recomputed, alone=alone)
                P, Q = oracle.peaks(events, pairs[rank], balanced[rank])
                answers[f"events_J2-{recomputed}-{alone}"] = np.array(events, dtype=np.int64).reshape(-1, 2)
                answers[f"peaks_3-{recomputed}-{alone}"] = [P, *_ratio(Q)]
        found |= named(f"time-{rank}", "out", answers)
    return found | _world(of_ranks, pairs, balanced, oracle) | _log(inputs, oracle) | _counters(inputs, oracle)


def _world(
    events: Sequence[Sequence[Event]],
    pairs: Sequence[peaks.Pairs],
    balanced: Sequence[peaks.Balanced],
    oracle: Oracle,
) -> dict[str, Tensor]:
    worst = oracle.cumulative(events, pairs, balanced)
    assert worst is not None
    idle = oracle.cumulative([(), ()], pairs[:2], balanced[:2])
    answers = {
        "cumulative": _ratio(worst),
        "none-where-nothing-runs": idle is None,
        "interval_22": [_ratio(end) for end in oracle.cumulative_interval(events, pairs, balanced)],
        "interval-where-nothing-runs_22": [
            _ratio(end) for end in oracle.cumulative_interval([(), ()], pairs[:2], balanced[:2])
        ],
    }
    return named("world", "out", answers)


def _log(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    lines: list[Pass | Literal["report", "abandon"]] = []
    for kind, label in given(inputs, "log")["lines_N2"].tolist():
        lines.append("report" if kind == _REPORT else "abandon" if kind == _ABANDON else (_KINDS[kind], label))
    reports = oracle.since_reports(lines)
    covered = [[n, *row] for n, passes in enumerate(reports) for row in _rows(passes)]
    answers = {"reports": len(reports), "covered_N3": covered}
    return named("log", "out", answers)


def _counters(inputs: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Count passes of every kind, and a second forward; their labels are their places."""
    drawn = given(inputs, "counters")
    passes = [
        oracle.RoutedPass(kind, n, drawn["ids_PTK"][n], drawn["padding_PT"][n].bool() if n else None)
        for n, kind in enumerate((*_KINDS, "forward"))
    ]
    trace = oracle.trace(passes)
    answers: dict[str, object] = {
        "counts_E": oracle.expert_counts(passes, _E),
        "counts-of-nothing_E": oracle.expert_counts([], _E),
    }
    for label, record in trace.items():
        answers[f"record_TE-{label}"] = [[e in chosen for e in range(_E)] for chosen in record]
    return named("counters", "out", answers)


def _passes(rows_P2: Tensor) -> list[Pass]:
    return [(_KINDS[kind], label) for kind, label in rows_P2.tolist()]


def _rows(passes: Sequence[Pass]) -> list[list[object]]:
    return [[_KINDS.index(kind), label] for kind, label in passes]


def _ratio(value: Fraction) -> tuple[int, int]:
    return value.numerator, value.denominator
