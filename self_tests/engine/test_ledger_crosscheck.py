"""Disagreements of ledgers are found, described, and blamed on the right ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moe_conformance.engine.ledger.crosscheck import cross_check
from moe_conformance.engine.ledger.disagreement import Disagreement
from moe_conformance.engine.ledger.entry import Entry
from moe_conformance.engine.ledger.table import table


def ledger(rank: int, *calls: Entry) -> tuple[Entry, ...]:
    """Numbers calls as a rank's recorder does."""
    sequences: dict[str, int] = {}
    entries = []
    for order, call in enumerate(calls):
        sequence = None
        if call.tag is None:
            sequences[call.group] = sequence = sequences.get(call.group, 0) + 1
        entries.append(replace(call, order=order, sequence=sequence, where=f"rank{rank}.py:{order}"))
    return tuple(entries)


PLAIN = Entry(
    order=0, op="", group="", ranks=(), sequence=None, in_splits=None, out_splits=None, shapes_in=(), shapes_out=(),
    dtype="float32", bytes_in=0, bytes_out=0, reduce=None, root=None, peer=None, tag=None, asynchronous=False, where="",
    state="waited",
)  # fmt: skip


def entry(op: str, ranks: tuple[int, ...] = (0, 1), **fields: Any) -> Entry:
    """An entry with default values."""
    return replace(PLAIN, op=op, ranks=ranks, **{"group": str(ranks), **fields})


def reduce(*shape: int, ranks: tuple[int, ...] = (0, 1), **fields: Any) -> Entry:
    """An all_reduce."""
    return entry("all_reduce", ranks, **{"shapes_in": (shape,), "shapes_out": (shape,), "reduce": "SUM", **fields})


def exchange(
    sent: Sequence[int], received: Sequence[int], ranks: tuple[int, ...] = (0, 1), width: int = 8, **fields: Any
) -> Entry:
    """An all_to_all_single of rows."""
    shapes = {"shapes_in": ((sum(sent), width),), "shapes_out": ((sum(received), width),)}
    splits = {"in_splits": tuple(sent), "out_splits": tuple(received)}
    return entry("all_to_all_single", ranks, **{**shapes, **splits, **fields})


def message(op: str, peer: int, *shape: int, ranks: tuple[int, ...] = (0, 1), tag: int = 0, **fields: Any) -> Entry:
    """A send or receive."""
    shapes = {"shapes_in" if op == "send" else "shapes_out": (shape,)}
    return entry(op, ranks, peer=peer, tag=tag, asynchronous=True, **{**shapes, **fields})


def check(*ranks: Sequence[Entry], cut: Sequence[int] = ()) -> tuple[Disagreement, ...]:
    """Cross-checks one list of calls per rank."""
    return cross_check({rank: ledger(rank, *calls) for rank, calls in enumerate(ranks)}, cut)


def only(found: Sequence[Disagreement]) -> tuple[str, tuple[int, ...]]:
    """The only disagreement: its words and whom it blames."""
    (disagreement,) = found
    return disagreement.words, disagreement.blamed


W4 = (0, 1, 2, 3)


class TestAgreement:
    def test_ranks_that_agree_have_no_disagreement(self) -> None:
        """Uneven exchanges, roots and messages that match are no disagreement."""
        zero = [
            exchange([1, 2], [1, 3]),
            reduce(3),
            entry("broadcast", root=1, shapes_out=((2,),)),
            message("send", 1, 4),
        ]
        one = [
            exchange([3, 0], [2, 0]),
            reduce(3),
            entry("broadcast", root=1, shapes_in=((2,),)),
            message("recv", 0, 4),
        ]
        assert () == check(zero, one)

    def test_even_splits_are_a_share_each(self) -> None:
        """Without splits every rank gets an equal share; a rank that names the same splits agrees."""
        even = exchange([2, 2], [2, 2], in_splits=None, out_splits=None)
        assert () == check([even], [exchange([2, 2], [2, 2])])
        words, blamed = only(check([even], [exchange([1, 3], [1, 3])]))
        assert (0, 1) == blamed
        assert "rank 0 sends 2 rows to rank 1, which expects 1 row" in words

    def test_lists_of_different_sizes_fit_where_both_sides_say_so(self) -> None:
        """all_gather and reduce_scatter of lists with different sizes match."""
        gather: dict[str, Any] = {"shapes_out": ((2, 3), (5, 3))}
        scatter: dict[str, Any] = {"shapes_in": ((2,), (5,))}
        zero = [
            entry("all_gather", shapes_in=((2, 3),), **gather),
            entry("reduce_scatter", shapes_out=((2,),), **scatter),
        ]
        one = [
            entry("all_gather", shapes_in=((5, 3),), **gather),
            entry("reduce_scatter", shapes_out=((5,),), **scatter),
        ]
        assert () == check(zero, one)
        broken = [replace(zero[0], shapes_out=((2, 3), (4, 3))), zero[1]]
        assert (
            "on group (0, 1) call 1, all_gather: rank 1 sends 5 rows to rank 0, which expects 4 rows",
            (0, 1),
        ) == only(check(broken, one))

    def test_a_group_of_one_agrees_with_itself(self) -> None:
        """A group of one rank has no disagreement."""
        assert () == check([reduce(3, ranks=(0,)), exchange([4], [4], ranks=(0,))])

    def test_groups_are_told_apart_by_name(self) -> None:
        """Two groups of the same ranks have separate sequence numbers."""
        calls = [reduce(3, group="a"), reduce(2, group="b")]
        assert () == check(calls, calls[::-1])


class TestSequence:
    def test_the_minority_is_blamed_for_another_operator(self) -> None:
        """Three ranks call the same, the fourth something else."""
        others = [reduce(3, ranks=W4), reduce(3, ranks=W4)]
        faulty = [reduce(3, ranks=W4), entry("barrier", W4)]
        words, blamed = only(check(others, others, faulty, others))
        assert "on group (0, 1, 2, 3) call 2: ranks 0, 1 and 3 call all_reduce; rank 2 calls barrier" == words
        assert (2,) == blamed

    def test_both_of_two_are_blamed(self) -> None:
        """Between two ranks there is no minority."""
        words, blamed = only(check([reduce(3)], [entry("barrier")]))
        assert ("on group (0, 1) call 1: rank 0 calls all_reduce; rank 1 calls barrier", (0, 1)) == (words, blamed)

    def test_a_missing_call_is_a_disagreement_unless_the_rank_was_cut_short(self) -> None:
        """A rank that raised may lack calls."""
        calls = [[reduce(3, ranks=W4)] * 2] * 3 + [[reduce(3, ranks=W4)]]
        (found,) = check(*calls)
        assert (
            "on group (0, 1, 2, 3) call 2: ranks 0, 1 and 2 call all_reduce; rank 3 makes no such call" == found.words
        )
        assert ((3,), (3,)) == (found.blamed, found.absent)
        assert () == check(*calls, cut=(3,))

    def test_what_follows_a_skipped_call_is_not_told(self) -> None:
        """A skipped call is one disagreement, though all later calls are shifted."""
        calls = [reduce(3), entry("barrier"), reduce(5), entry("barrier")]
        assert 1 == len(check(calls, calls[1:]))

    def test_the_earliest_disagreement_comes_first(self) -> None:
        """The earliest disagreement is first, on whichever group it is."""
        pair, all_ = (2, 3), W4
        good = [reduce(3, ranks=all_), reduce(3, ranks=pair), reduce(3, ranks=all_)]
        bad = [reduce(3, ranks=all_), reduce(4, ranks=pair), reduce(7, ranks=all_)]
        without = [good[0], good[2]]
        first, second = check(without, without, good, bad)
        assert (pair, all_) == (first.ranks, second.ranks)
        assert {2: 1, 3: 1} == dict(first.orders)


class TestSizes:
    def test_swapped_splits_are_blamed_on_the_common_rank(self) -> None:
        """Swapped splits are found although the totals are equal."""
        rows = [exchange([1, 2, 3, 4], [n + 1] * 4, ranks=W4) for n in range(4)]
        swapped = replace(rows[1], in_splits=(1, 2, 4, 3))
        words, blamed = only(check([rows[0]], [swapped], [rows[2]], [rows[3]]))
        expected = (
            "on group (0, 1, 2, 3) call 1, all_to_all_single: rank 1 sends 4 rows to rank 2, which expects 3 rows; "
            "rank 1 sends 3 rows to rank 3, which expects 4 rows"
        )
        assert (expected, (1,)) == (words, blamed)

    def test_one_pair_that_disagrees_is_blamed_as_a_pair(self) -> None:
        """One pair does not show which of its ranks is wrong."""
        words, blamed = only(check([exchange([2, 4], [2, 2])], [exchange([2, 2], [6, 2])]))
        assert "on group (0, 1) call 1, all_to_all_single: rank 0 sends 4 rows to rank 1, which expects 6 rows" == words
        assert (0, 1) == blamed

    def test_rows_of_different_length_are_told_in_elements(self) -> None:
        """Equal numbers of rows with different lengths are reported in elements."""
        words, _ = only(check([exchange([2, 2], [2, 2], width=4)], [exchange([2, 2], [2, 2])]))
        assert "rank 0 sends 8 elements to rank 1, which expects 16 elements" in words

    def test_splits_that_do_not_sum_are_the_fault_of_their_rank(self) -> None:
        """An entry that contradicts itself is blamed on its rank alone."""
        bad = replace(exchange([2, 3], [2, 2]), shapes_in=((4, 8),))
        words, blamed = only(check([exchange([2, 2], [2, 3])], [bad]))
        assert ("on group (0, 1) call 1, all_to_all_single: rank 1 sends 4 rows in splits [2, 3]", (1,)) == (
            words,
            blamed,
        )

    @pytest.mark.parametrize(
        ("usual", "other", "said"),
        [
            (reduce(3, ranks=W4), reduce(3, ranks=W4, reduce="MAX"), "rank 1 has the reduction MAX"),
            (reduce(3, ranks=W4), reduce(3, ranks=W4, dtype="bfloat16"), "rank 1 has bfloat16"),
            (reduce(3, ranks=W4), reduce(4, ranks=W4), "rank 1 has 4 elements"),
            (
                entry("broadcast", W4, root=0, shapes_out=((3,),)),
                entry("broadcast", W4, root=2, shapes_out=((3,),)),
                "rank 1 has root 2",
            ),
            (
                entry("all_gather_into_tensor", W4, shapes_in=((3,),), shapes_out=((12,),)),
                entry("all_gather_into_tensor", W4, shapes_in=((3,),), shapes_out=((9,),)),
                "rank 1 has 9 elements for 4 ranks with 3 elements each",
            ),
            (
                entry("reduce_scatter_tensor", W4, shapes_in=((12,),), shapes_out=((3,),)),
                entry("reduce_scatter_tensor", W4, shapes_in=((16,),), shapes_out=((4,),)),
                "rank 1 has 16 elements",
            ),
        ],
    )
    def test_what_must_be_the_same_everywhere_is_compared(self, usual: Entry, other: Entry, said: str) -> None:
        """The rank that differs is blamed."""
        words, blamed = only(check([usual], [other], [usual], [usual]))
        assert (1,) == blamed
        assert said in words

    def test_the_shape_of_what_is_reduced_is_free(self) -> None:
        """Equal numbers of elements in other shapes agree."""
        assert () == check([reduce(6)], [reduce(2, 3)])

    def test_gathers_and_scatters_are_held_against_the_root(self) -> None:
        """What the root expects of a rank is compared with what that rank sends."""
        gather = [entry("gather", root=0, shapes_in=((2,),), shapes_out=((2,), (3,)))]
        assert () == check(gather, [entry("gather", root=0, shapes_in=((3,),))])
        words, blamed = only(check(gather, [entry("gather", root=0, shapes_in=((4,),))]))
        assert "rank 1 sends 4 rows to rank 0, which expects 3 rows" in words
        assert (0, 1) == blamed
        scatter = [entry("scatter", root=0, shapes_in=((2,), (3,)), shapes_out=((2,),))]
        assert () == check(scatter, [entry("scatter", root=0, shapes_out=((3,),))])

    def test_many_ranks_are_named_in_few_words(self) -> None:
        """A disagreement of 512 ranks fits on a line."""
        ranks = tuple(range(512))
        calls = [[reduce(3, ranks=ranks)] for _ in ranks]
        calls[7] = [reduce(4, ranks=ranks)]
        words, blamed = only(check(*calls))
        assert (7,) == blamed
        assert len(words) < 200


class TestMessages:
    def test_messages_are_matched_by_route(self) -> None:
        """Messages are matched by source, destination and tag, in order."""
        zero = [message("send", 1, 2, tag=1), message("send", 1, 3, tag=2), message("send", 1, 4, tag=1)]
        one = [message("recv", 0, 3, tag=2), message("recv", 0, 2, tag=1), message("recv", 0, 4, tag=1)]
        assert () == check(zero, one)

    def test_a_message_of_another_size_blames_both(self) -> None:
        """A message of another size or dtype blames both ranks."""
        words, blamed = only(check([message("send", 1, 2)], [message("recv", 0, 3)]))
        expected = (
            "on group (0, 1) message 1 with tag 0: rank 0 sends 2 elements of float32 to rank 1, "
            "which expects 3 elements of float32"
        )
        assert (expected, (0, 1)) == (words, blamed)

    def test_a_message_that_nobody_takes_or_sends_is_told(self) -> None:
        """An unmatched send or receive is reported, unless the other side was cut short."""
        words, _ = only(check([message("send", 1, 2)], []))
        assert words.endswith("rank 0 sends 2 elements of float32 to rank 1, which never receives it")
        words, _ = only(check([message("recv", 1, 2)], []))
        assert words.endswith("rank 0 waits for 2 elements of float32 from rank 1, which never sends it")
        assert () == check([message("send", 1, 2)], [], cut=(1,))
        assert () == check([message("recv", 1, 2)], [], cut=(1,))

    def test_a_receive_from_any_takes_a_message_of_whatever_rank(self) -> None:
        """For receives from any rank only the number of messages is compared."""
        ranks = (0, 1, 2)
        send = [message("send", 0, 2, ranks=ranks)]
        receive = [message("recv", None, 2, ranks=ranks), message("recv", None, 2, ranks=ranks)]
        assert () == check(receive, send, send)
        words, _ = only(check(receive, send, []))
        assert words.endswith("rank 0 waits for 2 elements of float32 from some rank, which never sends it")


class TestTable:
    def test_the_call_stands_in_one_row(self) -> None:
        """The rows above and below hold each rank's earlier and later calls, and a gap where a rank lacks the call."""
        zero = [reduce(3), exchange([2, 4], [2, 2]), reduce(3), entry("barrier")]
        one = [reduce(3), exchange([2, 2], [6, 2]), reduce(3), entry("barrier")]
        ledgers = {rank: ledger(rank, *calls) for rank, calls in enumerate((zero, one))}
        (found,) = cross_check(ledgers)
        expected = """\
   rank 0                           rank 1
   all_reduce #1                    all_reduce #1
   float32 3                        float32 3
   SUM                              SUM
>  all_to_all_single #2             all_to_all_single #2
   float32 6x8 [2, 4] > 4x8 [2, 2]  float32 4x8 [2, 2] > 8x8 [6, 2]
   all_reduce #3                    all_reduce #3
   float32 3                        float32 3
   SUM                              SUM"""
        assert expected.splitlines() == table(ledgers, found, context=1).splitlines()

    def test_a_missing_call_is_a_gap(self) -> None:
        """The calls after the gap stand below it."""
        calls = [reduce(3), entry("barrier", dtype=""), reduce(5)]
        ledgers = {0: ledger(0, *calls), 1: ledger(1, calls[0])}
        (found,) = cross_check(ledgers)
        row = next(line for line in table(ledgers, found).splitlines() if line.startswith(">"))
        assert [">", "barrier", "#2", "(no", "such", "call)"] == row.split()
