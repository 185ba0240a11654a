"""Overload, worked out twice: reference.overload.factors with whole tensors, the longhand one bucket per expert."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random
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

    @pairs_agree
    @given(st.lists(st.integers(0, 4), max_size=3), st.randoms(use_true_random=False))
    def test_tokens_brought_agree(self, lead: list[int], random: Random) -> None:
        """Both count the places of any leading dims that are not padding."""
        assert second.tokens_brought(lead) == first.tokens_brought(lead)
        places = int(np.prod(lead, dtype=np.int64))
        padding = np.array([random.random() < 0.4 for _ in range(places)], dtype=np.bool_).reshape(lead)
        for shaped in (padding, padding.reshape(-1)):
            assert second.tokens_brought(lead, shaped) == first.tokens_brought(lead, torch.from_numpy(shaped))


IDS = table([[0, 1], [1, -1]], 2)
NONE = table([], 2)
REFUSED = {
    "no rank": plain([], [], 1),
    "ep of nobody": plain([IDS], [[0, 1]], 0),
    "ranks that do not spread": plain([IDS] * 3, [[0, 1]] * 3, 2),
    "K that differs": plain([IDS, table([[0]], 1)], [[0], [1]], 2),
    "K = 0": plain([table([], 0)], [[0, 1]], 1),
    "held by fewer ranks than there are": plain([IDS, IDS], [[0, 1]], 2),
    "padding of fewer ranks": Group([IDS, IDS], [[0], [1]], 2, [None], []),
    "an id below -1": plain([table([[0, -2]], 2)], [[0, 1]], 1),
    "an expert that nobody holds": plain([table([[0, 2]], 2)], [[0, 1]], 1),
    "an expert on too many ranks": plain([IDS, NONE], [[0, 1], [1]], 2),
    "an expert on too few": plain([IDS, NONE], [[0, 1], [1]], 1),
    "an expert twice on a rank": plain([IDS, NONE], [[0, 0], [1]], 2),
    "an expert twice on its only rank": plain([IDS, NONE], [[0, 0], [1, 1]], 1),
    "copies that route differently": Group([IDS, NONE], [[0], [1]], 2, [None, None], [[0, 1]]),
    "copies that pad differently": Group([IDS, IDS], [[0], [1]], 2, [None, np.array([True, False])], [[0, 1]]),
    "a position in two sets": Group([IDS, IDS], [[0], [1]], 2, [None, None], [[0, 1], [1]]),
    "a position twice in one set": Group([IDS, IDS], [[0], [1]], 2, [None, None], [[0, 0]]),
    "a position out of range": Group([IDS, IDS], [[0], [1]], 2, [None, None], [[1, 2]]),
    "a position below 0": Group([IDS, IDS], [[0], [1]], 2, [None, None], [[-1, 0]]),
    "an empty set of copies": Group([IDS, IDS], [[0], [1]], 2, [None, None], [[]]),
    "padding that is not bool": Group([IDS], [[0, 1]], 1, [np.zeros(2, dtype=np.int64)], []),
    "padding of another T": Group([IDS], [[0, 1]], 1, [np.zeros(3, dtype=np.bool_)], []),
    "ids of 32 bits": plain([IDS.astype(np.int32)], [[0, 1]], 1),
    "ids of one dim": plain([IDS[0]], [[0, 1]], 1),
}


class TestRefusals:
    @pytest.mark.parametrize("group", REFUSED.values(), ids=REFUSED.keys())
    def test_a_group_that_does_not_fit_is_refused_by_both(self, group: Group) -> None:
        """Parts that do not fit together have no overload."""
        with pytest.raises(ValueError, match=r"\w"):
            second.entry(group)
        with pytest.raises(ValueError, match=r"\w"):
            first_entry(group)

    @pytest.mark.parametrize(
        ("lead", "padding"),
        [([2, -1], None), ([-1, -2], None), ([2, 3], np.zeros(5, np.bool_)), ([3], np.zeros(3, np.int64))],
    )
    def test_places_that_do_not_fit_are_refused_by_both(self, lead: list[int], padding: Any) -> None:
        """A negative dim, padding of other places, or padding that is no truth value."""
        with pytest.raises(ValueError, match=r"\w"):
            second.tokens_brought(lead, padding)
        with pytest.raises(ValueError, match=r"\w"):
            first.tokens_brought(lead, None if padding is None else torch.from_numpy(padding))

    @pytest.mark.parametrize(("terms", "growth"), [(-1, Fraction(1)), (0, Fraction(-1, 2))])
    def test_less_than_no_error_is_refused_by_both(self, terms: int, growth: Fraction) -> None:
        """Neither a number of terms nor a growth can be negative."""
        with pytest.raises(ValueError, match=r"\w"):
            second.allowed_error(Fraction(1), terms, growth)
        with pytest.raises(ValueError, match=r"\w"):
            first_report.allowed_error(Fraction(1), terms, growth=growth)

    @pytest.mark.parametrize(
        ("pairs", "balanced"), [((), 1), ((2, -1), 1), ((2, 1), -1), ((0, 1), 0)], ids=lambda value: str(value)
    )
    def test_counts_that_do_not_fit_are_refused(self, pairs: tuple[int, ...], balanced: int) -> None:
        """No rank, less than no pair, less than no token, or a pair without a token have no factor."""
        with pytest.raises(ValueError, match=r"Entry"):
            first.factor(first.Entry(0, 0, pairs, Fraction(balanced)))


class TestByHand:
    @pytest.mark.parametrize("etp", [1, 2, 4])
    @pytest.mark.parametrize("ep", [1, 2, 3])
    def test_perfect_balance_is_1_in_every_layout(self, ep: int, etp: int) -> None:
        """Every expert once from every rank: each shard has all of its pairs, and so has balance."""
        # E = 2 ep, K = 2, ep tokens a rank: 2 ep pairs from each of W = ep etp ranks, one for each expert. A rank
        # holds 2 experts, so 2 W pairs. b = K sum T / ep = 2 (W ep) / ep = 2 W.
        W = ep * etp
        ids = [np.arange(2 * ep).reshape(ep, 2) for _ in range(W)]
        group = plain(ids, dealt(ep, etp, 2), ep)
        expected = Entry(0, 0, (2 * W,) * W, Fraction(2 * W))
        assert expected == first_entry(group)
        assert expected == second.entry(group)
        assert (1, 1) == (first_factor(expected), second.factor(expected))

    @pytest.mark.parametrize(("share", "slots", "expected"), [(3, 2, 4), (3, 3, 4), (2, 3, Fraction(8, 3))])
    def test_all_on_one_rank_is_ep_or_experts_over_slots(self, share: int, slots: int, expected: Fraction) -> None:
        """With ep 4: factor 4 while the rank has K experts to offer, else E / K."""
        # 5 tokens on each of 4 ranks: b = 20 K / 4 = 5 K. K <= N: all 20 K pairs on rank 2, 20 K / 5 K = 4.
        # N = 2, K = 3: two pairs of each token on rank 2, 40 in all, the rest on rank 0; 40 / 15 = 8 / 3 = E / K.
        row = [*range(2 * share, 3 * share), 0][:slots]
        entry = first_entry(plain([table([row] * 5, slots)] * 4, dealt(4, 1, share), 4))
        assert expected == first_factor(entry)
        assert expected == second.factor(entry)

    def test_uneven_tokens_with_even_loads_are_balanced(self) -> None:
        """10 and 100 tokens of two slots, 110 pairs on each rank: 1, where the small rank's own 20 would read 5.5."""
        ids = [table([[0, 1]] * 10, 2), table([[0, 1]] * 100, 2)]
        entry = first_entry(plain(ids, [[0], [1]], 2))
        assert Entry(0, 0, (110, 110), Fraction(110)) == entry
        assert 1 == first_factor(entry)
        assert Fraction(11, 2) == Fraction(110, 2 * 10)

    def test_padding_is_neither_load_nor_token(self) -> None:
        """17 and 70 tokens padded to 128: 88 / 87, where counting padded rows as tokens reads 88 / 256."""
        # K = 2, ep = 2: b = 2 (17 + 70) / 2 = 87. 86 tokens go to both ranks, one to rank 0 twice: 88 and 86 pairs.
        # The padded rows of rank 0 name rank 1's expert, those of rank 1 an expert that nobody has.
        ids = [table([[0, 1]] * 16 + [[0, 0]] + [[1, 1]] * 111, 2), table([[1, 0]] * 70 + [[9, 9]] * 58, 2)]
        padding: list[Any] = [np.arange(128) >= 17, np.arange(128) >= 70]
        group = Group(ids, [[0], [1]], 2, padding, [])
        expected = Entry(0, 0, (88, 86), Fraction(87))
        assert expected == first_entry(group)
        assert expected == second.entry(group)

    def test_a_dropped_pair_leaves_the_balance_as_it_is(self) -> None:
        """Of six pairs two are dropped: 3 / 3 becomes 2 / 3; all dropped is 0."""
        # ep = 2, K = 2, 3 tokens: b = 6 / 2 = 3. Expert 0 on rank 0, expert 1 on rank 1.
        for ids, pairs, expected in [
            (table([[0, 1], [1, 0], [0, 1]], 2), (3, 3), Fraction(1)),
            (table([[0, -1], [1, 0], [-1, 1]], 2), (2, 2), Fraction(2, 3)),
            (table([[-1, -1]] * 3, 2), (0, 0), Fraction(0)),
        ]:
            entry = first_entry(plain([ids, NONE], [[0], [1]], 2))
            assert Entry(0, 0, pairs, Fraction(3)) == entry
            assert expected == first_factor(entry)
            assert entry == second.entry(plain([ids, NONE], [[0], [1]], 2))

    def test_of_copies_one_counts(self) -> None:
        """Two tp ranks with the same two tokens bring two tokens, not four."""
        # etp = 2: both ranks hold shards of both experts; 3 pairs; b = 2 * 2 / 1 = 4.
        for copies, expected in [
            ([[0, 1]], Entry(0, 0, (3, 3), Fraction(4))),
            ([[0], [1]], Entry(0, 0, (6, 6), Fraction(8))),
        ]:
            group = Group([IDS, IDS], [[0, 1], [1, 0]], 1, [None, None], copies)
            assert expected == first_entry(group)
            assert expected == second.entry(group)

    def test_no_tokens_is_0(self) -> None:
        """An entry without tokens has no pairs, no balance and the factor 0."""
        entry = first_entry(plain([NONE, NONE], [[0], [1]], 2))
        assert Entry(0, 0, (0, 0), Fraction(0)) == entry
        assert (0, 0) == (first_factor(entry), second.factor(entry))

    def test_tokens_are_counted_in_all_leading_dims(self) -> None:
        """(S, B) = (3, 5) are 15 tokens, not 3, and less their padding; a lone row is one, an empty dim none."""
        padding = torch.zeros(3, 5, dtype=torch.bool)
        padding[0, 1] = padding[2, 4] = True
        assert [15, 13, 1, 0] == [
            first.tokens_brought([3, 5]),
            first.tokens_brought([3, 5], padding),
            first.tokens_brought([]),
            first.tokens_brought([0, 5]),
        ]


class TestLaws:
    @pairs_agree
    @given(groups(copied=False), st.randoms(use_true_random=False))
    def test_tokens_and_slots_have_no_order(self, group: Group, random: Random) -> None:
        """Permuting a rank's tokens with their padding, or the slots, changes nothing."""
        slots = list(range(group.ids[0].shape[1]))
        random.shuffle(slots)
        ids, padding = [], []
        for ids_TK, padding_T in zip(group.ids, group.padding, strict=True):
            order = list(range(len(ids_TK)))
            random.shuffle(order)
            ids.append(np.ascontiguousarray(ids_TK[order][:, slots]))
            padding.append(None if padding_T is None else padding_T[order])
        assert first_entry(group) == first_entry(group._replace(ids=ids, padding=padding))

    @pairs_agree
    @given(groups(copied=False), st.randoms(use_true_random=False))
    def test_relabelling_ranks_moves_their_pairs(self, group: Group, random: Random) -> None:
        """New positions in the group move each rank's pairs along and keep balance and factor."""
        order = list(range(len(group.ids)))
        random.shuffle(order)
        moved = Group(
            [group.ids[p] for p in order],
            [group.held[p] for p in order],
            group.ep,
            [group.padding[p] for p in order],
            [],
        )
        before, after = first_entry(group), first_entry(moved)
        assert tuple(before.pairs[p] for p in order) == after.pairs
        assert (before.balanced, first_factor(before)) == (after.balanced, first_factor(after))

    @pairs_agree
    @given(groups(padded=False, copied=False), st.randoms(use_true_random=False))
    def test_relabelling_experts_changes_nothing(self, group: Group, random: Random) -> None:
        """New names, told to routing and holders alike, move no pair."""
        experts = 1 + max(e for held in group.held for e in held)
        name = list(range(experts))
        random.shuffle(name)
        lookup = np.array([*name, -1])
        named = group._replace(
            ids=[lookup[ids] for ids in group.ids], held=[[name[e] for e in held] for held in group.held]
        )
        assert first_entry(group) == first_entry(named)

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_splitting_the_batch_keeps_its_pairs(self, ranks: int) -> None:
        """Eight tokens over 1, 2 or 4 ranks: the same 13 pairs in all, and 16 slots dealt to as many ranks."""
        ids_TK = np.array([[0, 1], [3, -1], [2, 2], [1, 0], [3, 1], [-1, -1], [0, 3], [3, 3]])
        entry = first_entry(plain(np.split(ids_TK, ranks), dealt(ranks, 1, 4 // ranks), ranks))
        loads = [3, 3, 2, 5]
        expected = tuple(sum(loads[place : place + 4 // ranks]) for place in range(0, 4, 4 // ranks))
        assert Entry(0, 0, expected, Fraction(16, ranks)) == entry

    @pairs_agree
    @given(groups(copied=False), st.integers(2, 3))
    def test_more_of_the_same_is_as_unbalanced(self, group: Group, times: int) -> None:
        """Every token several times over multiplies pairs and balance alike."""
        more = group._replace(
            ids=[np.concatenate([ids] * times) for ids in group.ids],
            padding=[None if one is None else np.concatenate([one] * times) for one in group.padding],
        )
        before, after = first_entry(group), first_entry(more)
        assert (tuple(times * p for p in before.pairs), times * before.balanced) == (after.pairs, after.balanced)

    @pairs_agree
    @given(groups(padded=False))
    def test_without_drops_the_largest_is_never_below_balance(self, group: Group) -> None:
        """Every slot filled: the factor is at least 1, and at most the number of ep ranks."""
        filled = group._replace(ids=[np.maximum(ids, 0) for ids in group.ids])
        entry = first_entry(filled)
        assert entry.balanced == 0 or 1 <= first_factor(entry) <= group.ep
