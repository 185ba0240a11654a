"""Rows of zeros among those of an expert: what fills them up is told from what was added and routed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_conformance.chapters.token_padding import workloads as token_padding
from moe_conformance.chapters.token_padding.judge import judge_added_rows, judge_alignment, judge_padded_counts
from moe_conformance.contract import Claims
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import Tally, WrongDelivery, WrongForm
from moe_conformance.scenarios.outcome import Answer, Handed, Outcome, RankOutcome
from self_tests.judging.breaking import broken, caught, claiming, edit_handed, judged
from self_tests.judging.simulated_exchange import workload

# Of 8 experts on two ranks each gets three rows of twelve tokens.
IN_TURN = torch.arange(24).remainder(8).reshape(2, 6, 2).tolist()


def filled_up(zeros: int, multiple: int = 1) -> Outcome:
    """Hand over so many rows of zeros behind the three of every expert, and claim a multiple."""
    return claiming(broken(workload(ids=IN_TURN), padding=zeros), Claims(multiple=multiple))


class TestAddedRows:
    def test_rows_that_fill_up_are_not_added_ones(self) -> None:
        """Three rows are filled up to four, or to eight, where the backend claims so."""
        assert {0, 1} == judged(judge_added_rows, filled_up(0)).ranks
        assert {0, 1} == judged(judge_added_rows, filled_up(1, multiple=4)).ranks
        assert {0, 1} == judged(judge_added_rows, filled_up(5, multiple=8)).ranks

    @pytest.mark.parametrize(
        ("zeros", "multiple", "words"),
        [
            (1, 1, "rank 0 receives 1 row of zeros for expert 0"),
            (2, 4, "rank 0 receives 1 row of zeros for expert 0"),
            (
                2,
                4,
                "in addition to the padding to multiples of 4; likely cause: padding tokens were routed",
            ),
        ],
    )
    def test_one_more_is_an_added_one(self, zeros: int, multiple: int, words: str) -> None:
        """What nothing explains was routed."""
        found = caught(judge_added_rows, filled_up(zeros, multiple))
        assert isinstance(found, WrongDelivery)
        assert words in found.sentence

    def test_an_expert_without_rows_may_have_one_multiple(self) -> None:
        """And no row more."""

        def lone(zeros: int) -> Outcome:
            return claiming(broken(workload(ids=[[[-1, -1]] * 6] * 2), padding=zeros), Claims(multiple=4))

        assert {0, 1} == judged(judge_added_rows, lone(4)).ranks
        assert "1 row of zeros for expert 0" in caught(judge_added_rows, lone(5)).sentence

    def test_a_rank_without_rows_may_have_one(self) -> None:
        """With it its experts run forward and backward; a second one was added."""

        def handing(zeros: int) -> Outcome:
            def few(call: Handed) -> Handed:
                counts_N = torch.zeros_like(call.counts_N)
                counts_N[0] = zeros
                return replace(call, rows_RD=call.rows_RD[:zeros], ids_RJ=call.ids_RJ[:zeros], counts_N=counts_N)

            outcome = broken(workload(ids=[[[-1, -1]] * 6] * 2), padding=2)
            return edit_handed(edit_handed(outcome, 0, few), 1, few)

        assert {0, 1} == judged(judge_added_rows, handing(1)).ranks
        assert "rank 0 receives 2 rows of zeros for expert 0" in caught(judge_added_rows, handing(2)).sentence

    def test_places_without_counts_hide_nothing_that_is_not_there(self) -> None:
        """All places of an expert are handed over then, and those that hold zeros pad."""

        def all_places(call: Handed) -> Handed:
            (N, C, _), held = call.shape, torch.arange(call.shape[0])
            return replace(call, counts_N=None, ids_RJ=held.repeat_interleave(C).reshape(N * C, 1))

        outcome = broken(workload(ids=IN_TURN), form="batched")
        for rank in (0, 1):
            outcome = edit_handed(outcome, rank, all_places)
        assert {0, 1} == judged(judge_added_rows, outcome).ranks


class TestCounts:
    @pytest.mark.parametrize("P", [None, 64.0, torch.tensor([64, 64])], ids=["none", "float", "tensor"])
    def test_a_count_is_a_whole_number(self, P: Any) -> None:
        """Anything else is told, and compared with nothing."""
        asked = next(token_padding.token_counts("alltoall", Layout(1), "quick"))
        answers = tuple(Answer({"": P}) for _ in asked.calls)
        told = RankOutcome(0, "ok", answers=answers, claims=Claims(alignment=asked.config.padding.alignment))
        for judge in (judge_padded_counts, judge_alignment):
            with pytest.raises(WrongForm, match="which is not an integer"):
                judge(Outcome("simulated", asked, (told,), 0.0), Tally())
