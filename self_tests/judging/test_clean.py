"""A perfect exchange has nothing to answer for, and every judge counts what it looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.shared.exchange.counts import judge_counts
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_inputs, judge_outputs
from moe_conformance.judging.shared.exchange.row_gradients import judge_out_gradients, judge_rows_gradients
from moe_conformance.judging.shared.exchange.weights import judge_weights
from moe_conformance.judging.verdict import NotOffered, RunFailed, WrongCount
from moe_conformance.scenarios.outcome import Outcome, RankOutcome
from self_tests.judging.breaking import judged
from self_tests.judging.simulated_exchange import Form, Simulation, simulate, workload

JUDGES = (
    judge_deliveries,
    judge_rows,
    judge_weights,
    judge_counts,
    judge_form,
    judge_outputs,
    judge_inputs,
    judge_out_gradients,
    judge_rows_gradients,
    judge_dx,
    judge_dweights,
)
LAYOUTS = [Layout(1), Layout(2, ep=2), Layout(4, ep=2), Layout(2, etp=2), Layout(4, ep=2, etp=2), Layout(4, etp=4)]


class TestPerfect:
    @pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
    @pytest.mark.parametrize("weights_at", ["input", "expert", "combine"])
    def test_every_judge_passes_and_counts_every_rank(self, layout: Layout, weights_at: str) -> None:
        """On every layout and wherever weights are applied, each judge compares on each rank, exactly in bf16."""
        work = workload(layout, tokens=8, dtype=torch.bfloat16, microbatches=2)
        outcome = simulate(work, Simulation(weights_at=weights_at, padding=1))  # type: ignore[arg-type]
        for judge in JUDGES:
            if judge is not judge_weights or weights_at != "combine":
                assert set(range(layout.world)) == judged(judge, outcome).ranks

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
    def test_every_dtype_is_exact(self, dtype: torch.dtype) -> None:
        """What is exact in bf16 is exact in the other dtypes."""
        outcome = simulate(workload(dtype=dtype))
        for judge in JUDGES:
            assert not judged(judge, outcome).vacuous

    @pytest.mark.parametrize("form", ["grouped", "listed", "batched"])
    def test_every_form_of_a_delivery_is_read(self, form: Form) -> None:
        """Rows by expert, rows with slots and places per expert hold the same pairs."""
        work = workload(drop=True)
        pairs = sum(int((batch.ids_TK >= 0).sum()) for batch in work.batches[0])
        for judge in JUDGES:
            if form != "listed" or judge is not judge_counts:
                judged(judge, simulate(work, Simulation(form)))
        assert pairs == judged(judge_deliveries, simulate(work, Simulation(form))).pairs

    def test_counts_that_nobody_claims_are_not_offered(self) -> None:
        """Where nothing is claimed, the judge of counts neither passes nor fails."""
        with pytest.raises(NotOffered, match="reports no tokens per expert"):
            judged(judge_counts, simulate(workload(), Simulation("listed")))

    @pytest.mark.parametrize("weights_at", ["input", "expert", "combine"])
    def test_slots_with_the_same_expert_are_two_pairs(self, weights_at: str) -> None:
        """A token with one expert in two slots is delivered twice, each time with its own weight."""
        work = workload(ids=[[[3, 3], [0, 3]], [[5, 5]]])
        outcome = simulate(work, Simulation(weights_at=weights_at))  # type: ignore[arg-type]
        for judge in JUDGES:
            if judge is not judge_weights or weights_at != "combine":
                judged(judge, outcome)
        assert 6 == judged(judge_deliveries, outcome).pairs

    @pytest.mark.parametrize("weight", [0.0, -0.5])
    def test_rows_that_weights_wipe_out_or_turn_over_are_not_judged(self, weight: float) -> None:
        """Weights of zero or below are judged but where they are applied at the input: rows lose their tags there."""
        work = workload()
        first = work.batches[0][0]
        weights_TK = first.weights_TK.clone()
        weights_TK[0, 0] = weight
        work = replace(work, batches=((replace(first, weights_TK=weights_TK), *work.batches[0][1:]),))
        judged(judge_outputs, simulate(work, Simulation(weights_at="combine")))
        with pytest.raises(NotOffered, match="remove the tags by which rows are recognised"):
            judged(judge_outputs, simulate(work, Simulation(weights_at="input")))

    def test_ranks_without_tokens_and_idle_experts_are_no_fault(self) -> None:
        """A rank may have no tokens, and an expert no rows."""
        work = workload(ids=[[], [[2, 1]]])
        for judge in JUDGES:
            judged(judge, simulate(work))

    def test_weights_gradients_too_long_for_the_dtype_are_bounded(self) -> None:
        """Where the sum over an expert's columns cannot be exact in bf16, one rounding per term is allowed."""
        work = workload(hidden=512, experts=4, dtype=torch.bfloat16)
        reading = read(simulate(work))
        assert all(bool((allowed > 0).all()) for allowed in reading.expected.dweights_allowed[0])
        assert all(bool((allowed == 0).all()) for allowed in read(simulate(workload())).expected.dweights_allowed[0])


def failed(*ranks: RankOutcome) -> Outcome:
    """An outcome in which some rank did not finish."""
    return Outcome("simulated", workload(Layout(len(ranks))), ranks, 0.0)


class TestUnfinished:
    def test_the_rank_that_raised_is_blamed_and_its_victims_are_not(self) -> None:
        """An exception on rank 1 that breaks rank 0's collective is rank 1's fault."""
        outcome = failed(
            RankOutcome(0, "raised", "forward:0", "RuntimeError: connection closed by peer", secondary=True),
            RankOutcome(1, "raised", "forward:0", "ValueError: bad splits"),
        )
        with pytest.raises(RunFailed, match="run: rank 1 raised in forward:0: ValueError: bad splits") as error:
            require_finished(outcome)
        assert (1,) == error.value.ranks

    def test_all_guilty_ranks_are_named(self) -> None:
        """Several ranks may hang, and each is blamed."""
        outcome = failed(RankOutcome(0, "hung", "backward:0"), RankOutcome(1, "ok"), RankOutcome(2, "died"))
        with pytest.raises(RunFailed, match="rank 0 hung in backward:0; rank 2 died") as error:
            read(outcome)
        assert (0, 2) == error.value.ranks

    def test_a_malformed_claim_is_a_wrong_count(self) -> None:
        """Claims that contradict each other are told as such, not as a crash."""
        outcome = failed(RankOutcome(0, "malformed", "forward:0", "counts [9] for 3 rows"), RankOutcome(1, "ok"))
        with pytest.raises(
            WrongCount, match=r"rank 0 reported inconsistent counts, shapes or claims in forward:0: counts \[9\]"
        ) as error:
            require_finished(outcome)
        assert (0,) == error.value.ranks

    def test_a_finished_run_is_read_in_the_order_of_ranks(self) -> None:
        """The order in which ranks report does not matter."""
        outcome = simulate(workload())
        backwards = replace(outcome, ranks=outcome.ranks[::-1])
        assert [0, 1] == [rank.rank for rank in read(backwards).ranks]
        judged(judge_outputs, backwards)
