"""Tokens that are not finite: what may follow from them passes, and what spreads is told in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_conformance.chapters.non_finite import workloads as non_finite
from moe_conformance.chapters.non_finite.judge import judge_delivered, judge_other_experts, judge_other_tokens
from moe_conformance.contract import Claims
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.verdict import NotOffered, Tally, WrongGradient, WrongOutput
from moe_conformance.scenarios.outcome import Grad, Microbatch, Outcome
from moe_conformance.workloads.records.workload import ParameterKey, Workload
from self_tests.judging.breaking import caught, claiming, judged
from self_tests.judging.breaking_experts import edit_final
from self_tests.judging.simulated_experts import simulate_experts

EP2 = Layout(2, ep=2)
TOKENS, UPSTREAM, DROPPED = "own-spoilt-tokens-even", "own-spoilt-upstream-even", "own-spoilt-dropped-even"
REACHED, APART = 0, 1  # tokens that are not finite go to experts of even ids
JUDGES = (judge_other_tokens, judge_delivered, judge_other_experts)


def drawn(name: str) -> Workload:
    """Return a workload of two ranks; rank 1 has the bad tokens."""
    return next(each for each in non_finite.draw("alltoall", EP2, "quick") if each.name == name)


def clean(name: str) -> Outcome:
    """Run it without a fault."""
    return simulate_experts(drawn(name))


def edit(outcome: Outcome, rank: int, **changed: object) -> Outcome:
    """Change fields of what a rank saw of its only microbatch."""
    ranks = list(outcome.ranks)
    (seen,) = ranks[rank].microbatches
    assert isinstance(seen, Microbatch)
    ranks[rank] = replace(ranks[rank], microbatches=(replace(seen, **changed),))  # type: ignore[arg-type]
    return replace(outcome, ranks=tuple(ranks))


def value(outcome: Outcome, rank: int, name: str) -> Tensor:
    """Return a copy of one of the fields."""
    found = getattr(outcome.ranks[rank].microbatches[0], name)
    found = found.value if isinstance(found, Grad) else found
    assert isinstance(found, Tensor)
    return found.clone()


class TestRight:
    @pytest.mark.parametrize("name", [TOKENS, UPSTREAM, DROPPED])
    def test_bad_tokens_that_harm_no_other_pass(self, name: str) -> None:
        """A layer whose tokens know nothing of each other passes, and other tokens are compared on both ranks."""
        outcome = clean(name)
        for judge in JUDGES:
            tally = judged(judge, outcome)
            assert judge is judge_delivered or {0, 1} == tally.ranks

    def test_experts_of_bad_tokens_are_free(self) -> None:
        """Gradients of experts that a bad token went to may be anything."""
        outcome = clean(TOKENS)
        assert any(not bool(grad.value.isfinite().all()) for rank in outcome.ranks for grad in _finals(rank))
        judged(judge_other_experts, outcome)


class TestClaimed:
    def test_values_that_are_claimed_to_spread_are_not_judged(self) -> None:
        """One-hot products multiply them by zero; that they are delivered is judged all the same."""
        outcome = claiming(clean(TOKENS), Claims(non_finite="all"))
        y_TD = value(outcome, 0, "y")
        y_TD[4] = torch.nan
        for judge, seen in ((judge_other_tokens, edit(outcome, 0, y=y_TD)), (judge_other_experts, outcome)):
            with pytest.raises(NotOffered, match="claims non_finite = 'all'"):
                judge(read(seen), Tally())
        judged(judge_delivered, outcome)

    def test_the_claim_alone_excuses_nothing(self) -> None:
        """Where nothing spreads the backend passes; a finite value that is wrong is told, beside others that spread."""
        outcome = claiming(clean(TOKENS), Claims(non_finite="all"))
        judged(judge_other_tokens, outcome)
        y_TD = value(outcome, 0, "y")
        y_TD[3], y_TD[4] = torch.nan, y_TD[4] + 1
        error = caught(judge_other_tokens, edit(outcome, 0, y=y_TD))
        assert isinstance(error, WrongOutput)
        assert "y of rank 0 token 4 is" in str(error)

    def test_the_claim_is_named_where_it_would_hold(self) -> None:
        """If all that is wrong is not finite; not beside a finite value that is wrong, and not to who claims it."""
        hint = "claims non_finite = 'all'"
        outcome = clean(TOKENS)
        y_TD = value(outcome, 0, "y")
        y_TD[3] = torch.nan
        assert str(caught(judge_other_tokens, edit(outcome, 0, y=y_TD))).endswith(hint)
        y_TD[4] += 1
        assert hint not in str(caught(judge_other_tokens, edit(outcome, 0, y=y_TD)))
        y_TD = value(outcome, 0, "y")
        y_TD[3] = torch.nan
        dx_TD = value(outcome, 0, "dx_TD")
        dx_TD[3] += 1
        wrong = edit(outcome, 0, y=y_TD, dx_TD=Grad(dx_TD))
        assert hint not in str(caught(judge_other_tokens, wrong))


class TestSpread:
    @pytest.mark.parametrize("name", [TOKENS, UPSTREAM, DROPPED])
    def test_a_gradient_of_another_expert_is_told(self, name: str) -> None:
        """NaN in the gradient of an expert that only finite tokens reach is told, with the expert and the rank."""

        def spread(rank: int, key: ParameterKey, gradient: Tensor) -> Tensor:
            return gradient * torch.nan if key == ("up", APART) else gradient

        error = caught(judge_other_experts, edit_final(clean(name), spread))
        assert isinstance(error, WrongGradient)
        assert "up of expert 1 on rank 0 is nan" in str(error)
        assert str(error).endswith("claims non_finite = 'all'")

    def test_no_claim_is_named_beside_a_finite_gradient_that_is_wrong(self) -> None:
        """As it would not settle that one."""

        def spread(rank: int, key: ParameterKey, gradient: Tensor) -> Tensor:
            return {APART: gradient * torch.nan, APART + 2: gradient + 1}.get(key[1], gradient)

        assert "claims" not in str(caught(judge_other_experts, edit_final(clean(TOKENS), spread)))

    def test_an_expert_of_a_bad_token_without_a_slot_is_not_free(self) -> None:
        """Where the bad token has no slot all experts are judged, those of even ids too."""

        def spread(rank: int, key: ParameterKey, gradient: Tensor) -> Tensor:
            return gradient * torch.nan if key == ("down", REACHED) else gradient

        error = caught(judge_other_experts, edit_final(clean(DROPPED), spread))
        assert "down of expert 0 on rank 0 is nan" in str(error)

    def test_an_output_of_another_token_is_told(self) -> None:
        """NaN in y of a finite token is told, with the tokens that are not finite."""
        outcome = clean(TOKENS)
        y_TD = value(outcome, 0, "y")
        y_TD[4] = torch.nan
        error = caught(judge_other_tokens, edit(outcome, 0, y=y_TD))
        assert isinstance(error, WrongOutput)
        assert "y of rank 0 token 4 is nan" in str(error)
        assert "rank 1 token 1, rank 1 token 2" in str(error)

    @pytest.mark.parametrize("name", ["dx_TD", "dweights_TK"])
    def test_a_gradient_of_another_token_is_told(self, name: str) -> None:
        """So is NaN in the gradient of a finite token or of its weights."""
        outcome = clean(UPSTREAM)
        gradient = value(outcome, 0, name)
        gradient[3] = torch.nan
        error = caught(judge_other_tokens, edit(outcome, 0, **{name: Grad(gradient)}))
        assert isinstance(error, WrongGradient)
        assert "rank 0 token 3 is nan" in str(error)

    def test_a_bad_token_without_a_slot_answers_zero(self) -> None:
        """A token that nobody routed has y = 0, whatever it holds."""
        outcome = clean(DROPPED)
        y_TD = value(outcome, 1, "y")
        y_TD[0] = torch.nan
        error = caught(judge_other_tokens, edit(outcome, 1, y=y_TD))
        assert "y of rank 1 token 0 is nan" in str(error)
        assert "the token has no slot" in str(error)

    def test_a_repaired_token_is_told(self) -> None:
        """A routed token of NaN whose answer is finite was not sent as it was."""
        outcome = clean(TOKENS)
        y_TD = value(outcome, 1, "y")
        y_TD[1] = 0.5
        error = caught(judge_delivered, edit(outcome, 1, y=y_TD))
        assert "rank 1 token 1 is NaN and routed to experts" in str(error)


def _finals(rank: object) -> list[Grad]:
    return list(rank.grads_final.values())  # type: ignore[attr-defined]
