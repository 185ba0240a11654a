"""Reports of overload: how the factors of many entries become the values that a rank reports.

The largest rank is found entry by entry (`overload.factor`), before any mean: a mean of ratios, exact in
fractions. The events in flight at once are in `overload_timelines.py`.

Sources: arithmetic of ratios; behaviour of Megatron-Core's overload factor log; Liu et al. 2025 (MoE parallel
folding: expert groups); Higham, Accuracy and Stability of Numerical Algorithms (the bound).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from moe_conformance.reference.overload.factors import Entry, factor

Empty = Literal["zero", "left_out"]
End = Literal["values", "either", "error"]


@dataclass(frozen=True)
class Report:
    """What a rank reports, exactly, and which of the names it may also leave out."""

    values: dict[str, Fraction]
    may_be_absent: frozenset[str]


def reported(
    entries: Sequence[Entry],
    stage: int,
    *,
    cumulative: Fraction | None,
    empty: Empty = "zero",
    prefix: str = "",
) -> Report:
    """Say what a rank of a pipeline stage reports (LOAD-06, -07, -10 to -13, -24, -25).

    Args:
        entries: of the whole world, in any order: all stages, slices, layers and microbatches.
        stage: the reporting rank's own.
        cumulative: `overload_timelines.cumulative` of the world, None if no rank has a balanced peak.
        empty: whether entries without tokens (b = 0) count as 0 or are left out; allowed if alike for all.
        prefix: what stands before every name.

    Rule: the factor of each entry first; then avg is the mean over the stage's entries, each weighing the
    same, max the largest of the world; per layer both over that layer's entries in the stage. Numbers of
    entries per layer, slice and stage are free.

    Degenerate: an entry without a layer number enters nothing. A stage without entries has avg 0, the
    world's max, and may leave all out; a layer without entries has no name.

    Decides: LOAD-06, LOAD-07, LOAD-10, LOAD-11, LOAD-13, LOAD-24, LOAD-25. Source: arithmetic.

    >>> one = [Entry(0, 0, (6, 2), Fraction(4)), Entry(0, 0, (3, 5), Fraction(4)), Entry(0, 2, (1, 3), Fraction(2))]
    >>> report = reported([*one, Entry(1, 3, (8, 0), Fraction(4))], 0, cumulative=Fraction(5, 4))
    >>> {name: str(value) for name, value in report.values.items() if "layer" not in name}
    {'avg_overload_factor': '17/12', 'max_overload_factor': '2', 'max_cum_overload_factor': '5/4'}
    >>> {name[:3] + name[-2:]: str(value) for name, value in report.values.items() if "layer" in name}
    {'avg_0': '11/8', 'max_0': '3/2', 'avg_2': '3/2', 'max_2': '3/2'}
    >>> sorted(reported(one, 1, cumulative=None).may_be_absent)
    ['avg_overload_factor', 'max_cum_overload_factor', 'max_overload_factor']
    """
    if empty not in ("zero", "left_out"):
        raise ValueError(f"empty entries count as 'zero' or are 'left_out', not {empty!r}")
    factors = [
        (i.stage, i.layer, factor(i)) for i in entries if i.layer is not None and (i.balanced > 0 or empty == "zero")
    ]
    own = [(layer, o) for at, layer, o in factors if at == stage]
    values = {
        "avg_overload_factor": _mean([o for _, o in own]),
        "max_overload_factor": max((o for _, _, o in factors), default=Fraction(0)),
        "max_cum_overload_factor": Fraction(0) if cumulative is None else cumulative,
    }
    absent = set() if own else set(values)
    if cumulative is None:
        absent.add("max_cum_overload_factor")
    for layer in sorted({layer for layer, _ in own}):
        of_layer = [o for at, o in own if at == layer]
        values[f"avg_overload_factor_layer_{layer}"] = _mean(of_layer)
        values[f"max_overload_factor_layer_{layer}"] = max(of_layer)
    return Report({prefix + name: value for name, value in values.items()}, frozenset(prefix + name for name in absent))


def allowed_error(exact: Fraction, terms: int, *, growth: Fraction | int = 1) -> Fraction:
    """Say how far a reported value may lie from the exact one, (n + 4) 2^-23 |exact| growth (LOAD-14).

    Rule: `terms` are the entries or events that the value is made of, 1 for a maximum of entries; `growth` is
    1, and for a cumulative factor its events' balanced counts over the balanced peak.

    Decides: LOAD-14. Source: Higham, Accuracy and Stability of Numerical Algorithms.

    >>> allowed_error(Fraction(3, 2), 4) == Fraction(12, 2**23)
    True
    """
    if terms < 0 or growth < 0:
        raise ValueError(f"{terms} terms with growth {growth}: neither can be negative")
    return (terms + 4) * abs(exact) * growth / 2**23


def ends(
    recorded_by_rank: Sequence[Sequence[Hashable]],
    exchange_groups: Sequence[Sequence[int]],
    stage_by_rank: Sequence[int],
) -> tuple[End, ...]:
    """Say for every rank how a report may end when ranks recorded different entries (LOAD-11, LOAD-12).

    Args:
        recorded_by_rank: of every rank of the world, a label for each entry that it recorded, in any order.
        exchange_groups: of every group, its ranks.
        stage_by_rank: of every rank, its pipeline stage.

    Rule: an entry that only some ranks of a group recorded is an "error" on all of them. Slices of one stage
    with different numbers of entries end with values or with an error; as the stages share a reduction,
    "either" holds for the whole world then, and each stage ends alike on all its ranks. Else "values":
    stages may differ, and which layers the entries of a slice are of is free.

    Decides: LOAD-12. Source: semantics of collectives.

    >>> ends([["a"], ["a"], ["b"], ["b"]], [[0, 1], [2, 3]], [0, 0, 0, 0])
    ('values', 'values', 'values', 'values')
    >>> ends([["a"], ["b"], ["a"], ["a"]], [[0, 1], [2, 3]], [0, 0, 0, 0])
    ('error', 'error', 'either', 'either')
    """
    ranks = sorted(rank for group in exchange_groups for rank in group)
    if ranks != list(range(len(recorded_by_rank))) or len(stage_by_rank) != len(ranks):
        raise ValueError(f"groups {exchange_groups} and {len(stage_by_rank)} stages must hold every rank once")
    if any(len({stage_by_rank[rank] for rank in group}) > 1 for group in exchange_groups):
        raise ValueError(f"an exchange group of {exchange_groups} lies over two stages of {stage_by_rank}")
    failed: set[int] = set()
    sizes: dict[int, set[int]] = {}  # stage -> the numbers of entries of its slices
    for group in exchange_groups:
        if any(Counter(recorded_by_rank[rank]) != Counter(recorded_by_rank[group[0]]) for rank in group):
            failed |= set(group)
        for rank in group:
            sizes.setdefault(stage_by_rank[rank], set()).add(len(recorded_by_rank[rank]))
    others: End = "either" if failed or any(len(numbers) > 1 for numbers in sizes.values()) else "values"
    return tuple("error" if rank in failed else others for rank in range(len(ranks)))


def _mean(factors: Sequence[Fraction]) -> Fraction:
    """Average, 0 of nothing."""
    return sum(factors, Fraction(0)) / max(len(factors), 1)
