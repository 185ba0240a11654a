"""Overload, worked out twice: reference.overload.factors with whole tensors, the longhand one bucket per expert."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.overload import factors as first
from moe_conformance.reference.overload import report as first_report
from self_tests.chapters.overload.second import factors as second
from self_tests.chapters.overload.second.factors import Entry, Group
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

Ints = NDArray[np.int64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

# (ep, etp), all with different numbers of ranks but for the two ways of having two and three.
LAYOUTS = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (5, 1), (3, 2)]


def first_entry(group: Group, stage: int = 0, layer: int | None = 0) -> Entry:
    """The first oracle's entry of a longhand group."""
    padding = [None if one is None else torch.from_numpy(one) for one in group.padding]
    made = first.entry(
        [torch.from_numpy(ids) for ids in group.ids],
        group.held,
        ep=group.ep,
        stage=stage,
        layer=layer,
        padding_by_rank=padding,
        copies=group.copies,
    )
    return Entry(made.stage, made.layer, tuple(made.pairs), made.balanced)


def first_factor(entry: Entry) -> Fraction:
    """The first oracle's factor of a longhand entry."""
    return first.factor(first.Entry(*entry))


def plain(ids: Sequence[Ints], held: Sequence[Sequence[int]], ep: int) -> Group:
    """A group without padding and copies."""
    return Group(ids, held, ep, [None] * len(ids), [])


def table(rows: Sequence[Sequence[int]], slots: int) -> Ints:
    """Ids (T, K), with their K even where there is no token."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), slots)


def dealt(ep: int, etp: int, share: int) -> list[list[int]]:
    """Experts in equal runs along ep, every run on etp neighbours."""
    return [list(range(place * share, (place + 1) * share)) for place in range(ep) for _ in range(etp)]


@st.composite
def groups(draw: st.DrawFn, *, padded: bool = True, copied: bool = True) -> Group:
    """Uneven and absent tokens, empty and repeated slots; padding with ids that may mean nothing; copies of ranks."""
    ep, etp = draw(st.sampled_from(LAYOUTS))
    share, slots = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    names = draw(st.permutations(range(ep * share)))
    held = [draw(st.permutations([names[e] for e in run])) for run in dealt(ep, etp, share)]
    held = [held[place] for place in draw(st.permutations(range(ep * etp)))]
    ids, padding = [], []
    for _ in range(ep * etp):
        tokens = draw(st.integers(0, 4))
        hidden = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)) if padded else []
        hidden = hidden if draw(st.booleans()) else [False] * tokens
        rows = []
        for t in range(tokens):
            top = ep * share + 2 if padded and hidden[t] else ep * share - 1
            rows.append(draw(st.lists(st.integers(-1, top), min_size=slots, max_size=slots)))
        ids.append(table(rows, slots))
        padding.append(np.array(hidden, dtype=np.bool_) if padded and any(hidden) else None)
    copies = []
    if copied and draw(st.booleans()):
        order = draw(st.permutations(range(ep * etp)))
        size = draw(st.integers(1, len(order)))
        copies = [list(order[:size]), list(order[size:])] if size < len(order) else [list(order)]
        for places in copies:
            for place in places:
                ids[place], padding[place] = ids[places[0]].copy(), padding[places[0]]
    return Group(ids, held, ep, padding, copies)


class TestEntryPair:
    @pairs_agree
    @given(groups(), st.integers(0, 3), st.one_of(st.none(), st.integers(0, 5)))
    def test_entries_agree(self, group: Group, stage: int, layer: int | None) -> None:
        """Both find the same pairs on every rank and the same balanced count, exactly."""
        assert second.entry(group, stage, layer) == first_entry(group, stage, layer)

    @pairs_agree
    @given(groups())
    def test_factors_agree(self, group: Group) -> None:
        """Both divide the same largest by the same balance; an entry without tokens is 0 to both."""
        entry = second.entry(group)
        assert second.factor(entry) == first_factor(entry)


def first_measure(group: Group) -> tuple[Any, ...]:
    """Pairs of every rank, balance and factor."""
    entry = first_entry(group)
    return entry.pairs, entry.balanced, first_factor(entry)


def second_measure(group: Group) -> tuple[Any, ...]:
    """The same of the longhand."""
    entry = second.entry(group)
    return entry.pairs, entry.balanced, second.factor(entry)


def on_two(ids: Sequence[Sequence[int]]) -> Group:
    """These tokens on rank 0 of two, which holds expert 0, and none on rank 1, which holds expert 1."""
    return plain([table(ids, 2), NONE], [[0], [1]], 2)


def in_sets(*copies: list[int]) -> Group:
    """The same two tokens on two ranks, which are told to be copies of each other in these sets."""
    return Group([IDS, IDS], [[0], [1]], 2, [None, None], list(copies))


def on_each(ep: int, etp: int) -> Group:
    """Every one of 2 ep experts once from every rank: 2 W pairs on each, and b = 2 (W ep) / ep = 2 W."""
    return plain([np.arange(2 * ep).reshape(ep, 2)] * (ep * etp), dealt(ep, etp, 2), ep)


def on_rank_2(share: int, slots: int) -> Group:
    """5 tokens on each of 4 ranks choose as many experts of rank 2 as they can: b = 20 K / 4 = 5 K."""
    row = [*range(2 * share, 3 * share), 0][:slots]
    return plain([table([row] * 5, slots)] * 4, dealt(4, 1, share), 4)


IDS, NONE = table([[0, 1], [1, -1]], 2), table([], 2)
HALF, TWO_THIRDS = [[0, 1], [1, 0], [0, 1]], [[0, -1], [1, 0], [-1, 1]]
# 17 and 70 tokens, padded to 128; rows of padding name the other rank's expert, or one that nobody has.
PADDED = Group(
    [table([[0, 1]] * 16 + [[0, 0]] + [[1, 1]] * 111, 2), table([[1, 0]] * 70 + [[9, 9]] * 58, 2)],
    [[0], [1]],
    2,
    [np.arange(128) >= 17, np.arange(128) >= 70],
    [],
)

test_by_hand = by_hand(
    *rows(first_measure, second_measure,
        *(
            (f"ep {ep}, etp {etp} in perfect balance", (on_each(ep, etp),),
             ((2 * W,) * W, Fraction(2 * W), Fraction(1)))
            for ep, etp, W in [(1, 1, 1), (1, 4, 4), (2, 1, 2), (3, 2, 6)]
        ),
        ("all K on one of ep 4: 4", (on_rank_2(3, 2),), ((0, 0, 40, 0), Fraction(10), Fraction(4))),
        ("K = N on one of ep 4: 4", (on_rank_2(3, 3),), ((0, 0, 60, 0), Fraction(15), Fraction(4))),
        ("K > N on one of ep 4: E / K", (on_rank_2(2, 3),), ((20, 0, 40, 0), Fraction(15), Fraction(8, 3))),
        ("10 and 100 tokens with even loads are balanced",
         (plain([table([[0, 1]] * 10, 2), table([[0, 1]] * 100, 2)], [[0], [1]], 2),),
         ((110, 110), Fraction(110), Fraction(1))),
        ("padding is neither load nor token: 88 / 87, not 88 / 256", (PADDED,),
         ((88, 86), Fraction(87), Fraction(88, 87))),
        ("no pair is dropped: 3 / 3", (on_two(HALF),), ((3, 3), Fraction(3), Fraction(1))),
        ("a dropped pair leaves the balance: 2 / 3", (on_two(TWO_THIRDS),), ((2, 2), Fraction(3), Fraction(2, 3))),
        ("all pairs dropped: 0", (on_two([[-1, -1]] * 3),), ((0, 0), Fraction(3), Fraction(0))),
        ("no tokens: 0", (on_two([]),), ((0, 0), Fraction(0), Fraction(0))),
        ("of copies one counts", (in_sets([0, 1])._replace(held=[[0, 1], [1, 0]], ep=1),),
         ((3, 3), Fraction(4), Fraction(3, 4))),
        ("ranks that are no copies count each", (in_sets([0], [1])._replace(held=[[0, 1]] * 2, ep=1),),
         ((6, 6), Fraction(8), Fraction(3, 4))),
        # Parts that do not fit together have no overload.
        ("no rank", (plain([], [], 1),), REFUSED),
        ("ep of nobody", (plain([IDS], [[0, 1]], 0),), REFUSED),
        ("ranks that do not spread", (plain([IDS] * 3, [[0, 1]] * 3, 2),), REFUSED),
        ("K that differs", (plain([IDS, table([[0]], 1)], [[0], [1]], 2),), REFUSED),
        ("K = 0", (plain([table([], 0)], [[0, 1]], 1),), REFUSED),
        ("held by fewer ranks than there are", (plain([IDS, IDS], [[0, 1]], 2),), REFUSED),
        ("padding of fewer ranks", (in_sets()._replace(padding=[None]),), REFUSED),
        ("an id below -1", (plain([table([[0, -2]], 2)], [[0, 1]], 1),), REFUSED),
        ("an expert that nobody holds", (plain([table([[0, 2]], 2)], [[0, 1]], 1),), REFUSED),
        ("an expert on too many ranks", (plain([IDS, NONE], [[0, 1], [1]], 2),), REFUSED),
        ("an expert on too few", (plain([IDS, NONE], [[0, 1], [1]], 1),), REFUSED),
        ("an expert twice on a rank", (plain([IDS, NONE], [[0, 0], [1]], 2),), REFUSED),
        ("an expert twice on its only rank", (plain([IDS, NONE], [[0, 0], [1, 1]], 1),), REFUSED),
        ("copies that route differently", (in_sets([0, 1])._replace(ids=[IDS, NONE]),), REFUSED),
        ("copies that pad differently", (in_sets([0, 1])._replace(padding=[None, np.array([True, False])]),), REFUSED),
        ("a position in two sets", (in_sets([0, 1], [1]),), REFUSED),
        ("a position twice in one set", (in_sets([0, 0]),), REFUSED),
        ("a position out of range", (in_sets([1, 2]),), REFUSED),
        ("a position below 0", (in_sets([-1, 0]),), REFUSED),
        ("an empty set of copies", (in_sets([]),), REFUSED),
        ("padding that is not bool", (Group([IDS], [[0, 1]], 1, [np.zeros(2, dtype=np.int64)], []),), REFUSED),
        ("padding of another T", (Group([IDS], [[0, 1]], 1, [np.zeros(3, dtype=np.bool_)], []),), REFUSED),
        ("ids of 32 bits", (plain([IDS.astype(np.int32)], [[0, 1]], 1),), REFUSED),
        ("ids of one dim", (plain([IDS[0]], [[0, 1]], 1),), REFUSED),
    ),
    *rows(first_entry, second.entry, ("an entry of stage 0 and layer 0", (on_two([]),), (0, 0, (0, 0), Fraction(0)))),
    *rows(lambda exact, terms, growth: first_report.allowed_error(exact, terms, growth=growth), second.allowed_error,
        ("less than no terms", (Fraction(1), -1, Fraction(1)), REFUSED),
        ("less than no growth", (Fraction(1), 0, Fraction(-1, 2)), REFUSED),
    ),
)  # fmt: skip


@pytest.mark.parametrize(("pairs", "balanced"), [((), 1), ((2, -1), 1), ((2, 1), -1), ((0, 1), 0)])
def test_counts_that_do_not_fit_are_refused(pairs: tuple[int, ...], balanced: int) -> None:
    """No rank, less than no pair, less than no token, or a pair without a token have no factor."""
    with pytest.raises(ValueError, match=r"Entry"):
        first.factor(first.Entry(0, 0, pairs, Fraction(balanced)))
