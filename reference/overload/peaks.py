"""Peaks of overload: the most pairs that a rank holds at once, over the most that balance would hold.

Two running sums go over one timeline (`overload_timelines.py`): of the rank's own pairs, and of the balanced
count of its whole exchange group. Each has its own peak, which need not be at the same moment.

Sources: behaviour of Megatron-Core's overload factor log; Narayanan et al. 2021 (1F1B); Higham, Accuracy and
Stability of Numerical Algorithms (the bound).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate

from moe_conformance.reference.overload.report import allowed_error
from moe_conformance.reference.overload.timelines import Event, Label

Pairs = Mapping[Label, int]
Balanced = Mapping[Label, Fraction]


def peaks(events: Sequence[Event], pairs: Pairs, balanced: Balanced) -> tuple[int, Fraction]:
    """Find the two peaks of one rank, P_r and Q_r (LOAD-08, LOAD-09).

    Args:
        events: of one rank, in order.
        pairs: of every entry, a_ir of this rank.
        balanced: of every entry, b_i of its exchange group, not of the rank's own tokens.

    Rule: P = max_j sum_{l<=j} g_l a_{i(l)}, and Q the same of b.

    Degenerate: no events give (0, 0). Forwards alone give the sums of all.

    Decides: LOAD-08, LOAD-09. Source: arithmetic.

    >>> a, b = {"x": 3, "y": 5}, {"x": Fraction(4), "y": Fraction(2)}
    >>> P, Q = peaks([("x", 1), ("y", 1), ("y", -1), ("x", -1)], a, b)
    >>> P, str(Q)
    (8, '6')
    >>> P, Q = peaks([("x", 1), ("x", -1), ("y", 1), ("y", -1)], a, b)  # the two peaks at different moments
    >>> P, str(Q)
    (5, '4')
    """
    unknown = {label for label, _ in events} - (pairs.keys() & balanced.keys())
    if unknown:
        raise ValueError(f"no counts are given for the entries {sorted(map(repr, unknown))}")
    held = accumulate(sign * pairs[label] for label, sign in events)
    even = accumulate(sign * balanced[label] for label, sign in events)
    return max(held, default=0), max(even, default=Fraction(0))


def cumulative(
    events_by_rank: Sequence[Sequence[Event]], pairs_by_rank: Sequence[Pairs], balanced_by_rank: Sequence[Balanced]
) -> Fraction | None:
    """Give the maximum cumulative factor, max P_r / Q_r over all ranks of the world (LOAD-08, LOAD-13).

    Degenerate: a rank with Q_r = 0 adds nothing; if there is no other, None: the value is 0 or absent.

    >>> up_down, b = [("x", 1), ("x", -1)], {"x": Fraction(4)}
    >>> str(cumulative([up_down, up_down, []], [{"x": 3}, {"x": 5}, {}], [b, b, {}]))
    '5/4'
    """
    of_ranks = [peaks(*rank) for rank in zip(events_by_rank, pairs_by_rank, balanced_by_rank, strict=True)]
    return max((P / Q for P, Q in of_ranks if Q), default=None)


def cumulative_interval(
    events_by_rank: Sequence[Sequence[Event]], pairs_by_rank: Sequence[Pairs], balanced_by_rank: Sequence[Balanced]
) -> tuple[Fraction, Fraction]:
    """Say between which values a reported maximum cumulative factor may lie (LOAD-14).

    Rule: rank r's ratio x_r is rounded by at most d_r = (J_r + 4) 2^-23 x_r (sum_j b_{i(j)}) / Q_r, as the
    sums go up and down; the largest of the rounded ones lies within [max_r (x_r - d_r), max_r (x_r + d_r)].

    Degenerate: no rank with Q_r > 0 gives (0, 0).

    Decides: LOAD-08, LOAD-09. Source: arithmetic; Higham, Accuracy and Stability of Numerical Algorithms.

    >>> low, high = cumulative_interval([[("x", 1), ("x", -1)]], [{"x": 5}], [{"x": Fraction(4)}])
    >>> (high - low) / 2 == 6 * Fraction(1, 2**23) * Fraction(5, 4) * 2
    True
    """
    lows, highs = [], []
    for events, pairs, balanced in zip(events_by_rank, pairs_by_rank, balanced_by_rank, strict=True):
        P, Q = peaks(events, pairs, balanced)
        if Q:
            gross = sum((balanced[label] for label, _ in events), Fraction(0))
            error = allowed_error(P / Q, len(events), growth=gross / Q)
            lows.append(P / Q - error)
            highs.append(P / Q + error)
    return max(lows, default=Fraction(0)), max(highs, default=Fraction(0))
