"""Packed sequences: refused by all-gathers alone, by all ranks or by none."""

from __future__ import annotations

from typing import Literal

import pytest

from moe_conformance.chapters.config_rules.judge.config_rules import judge_packed
from moe_conformance.chapters.config_rules.workloads import config_rules
from moe_conformance.contract import Claims, Limit
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import NotOffered, Raised, Refused, Tally, WrongForm
from moe_conformance.scenarios.outcome import Answer, Outcome, RankOutcome
from moe_conformance.workloads.records.features import broken

Wire = Literal["pairs", "tokens", "all", "copies"]

EP2 = Layout(2, ep=2)
BUILT, *FED = config_rules.draw("alltoall", EP2, "quick")
REFUSED = Answer(
    error="padding.packed=True", error_type="moe_conformance.contract.config.Unsupported", error_by="library"
)
NOT_ADAPTED = Answer(error="no packed", error_type="moe_conformance.contract.config.Unsupported", error_by="adapter")
STUMBLED = Answer(error="no such name", error_type="builtins.NameError")


def told(wire: Wire) -> Answer:
    """Return what the building of an exchange brings about."""
    return Answer(claims=Claims(wire=wire))


def outcome(plain: tuple[Answer, Answer], asked: tuple[Answer, Answer]) -> Outcome:
    """Return what two ranks answered when they were asked for an exchange, and for one of packed sequences."""
    ranks = tuple(RankOutcome(rank, "ok", answers=(plain[rank], asked[rank])) for rank in range(2))
    return Outcome("simulated", BUILT, ranks, 0.0)


class TestRefusal:
    @pytest.mark.parametrize("wire", ["pairs", "tokens", "all", "copies"])
    def test_everybody_may_build(self, wire: Wire) -> None:
        """An exchange of any kind may be built on all ranks."""
        tally = Tally()
        judge_packed(outcome((told(wire),) * 2, (told(wire),) * 2), tally)
        assert {0, 1} == tally.ranks

    @pytest.mark.parametrize("wire", ["all", "copies"])
    def test_an_all_gather_may_refuse(self, wire: Wire) -> None:
        """On all ranks."""
        tally = Tally()
        judge_packed(outcome((told(wire),) * 2, (REFUSED,) * 2), tally)
        assert {0, 1} == tally.ranks

    @pytest.mark.parametrize(("wire", "words"), [("pairs", "an all-to-all"), ("tokens", "a fused token exchange")])
    def test_no_other_may(self, wire: Wire, words: str) -> None:
        """What takes any T has no reason to."""
        refused = f"{words} refuses packed sequences .T differs between ranks., which it must accept,"
        with pytest.raises(Refused, match=f"{refused} on rank 0, rank 1: 'padding.packed=True'"):
            judge_packed(outcome((told(wire),) * 2, (REFUSED,) * 2), Tally())

    def test_one_rank_alone_may_not(self) -> None:
        """The others would wait for it in the first exchange."""
        with pytest.raises(Refused, match="built on rank 0 and refused on rank 1"):
            judge_packed(outcome((told("all"),) * 2, (told("all"), REFUSED)), Tally())

    def test_an_adapter_alone_on_some_ranks_is_no_excuse(self) -> None:
        """It is not adapted on all ranks, or it is refused on some."""
        with pytest.raises(Refused, match="refused on rank 1"):
            judge_packed(outcome((told("all"),) * 2, (told("all"), NOT_ADAPTED)), Tally())

    def test_a_slip_is_no_refusal(self) -> None:
        """A name that is not there says nothing of the configuration."""
        with pytest.raises(Raised, match="on rank 0 raised an internal error"):
            judge_packed(outcome((told("all"),) * 2, (STUMBLED,) * 2), Tally())


class TestKind:
    def test_without_an_exchange_nothing_is_decided(self) -> None:
        """Where it is not built without packed sequences either, the refusal is not of them."""
        with pytest.raises(NotOffered, match=r"padding\.packed=True"):
            judge_packed(outcome((REFUSED,) * 2, (REFUSED,) * 2), Tally())

    def test_an_adapter_may_not_know_of_them(self) -> None:
        """Then the library has not been asked."""
        with pytest.raises(NotOffered, match="no packed"):
            judge_packed(outcome((told("pairs"),) * 2, (NOT_ADAPTED,) * 2), Tally())

    def test_all_ranks_claim_the_same(self) -> None:
        """An exchange that is of one kind here and of another there is told."""
        with pytest.raises(WrongForm, match="the ranks claim wire = all, pairs; expected the same on all ranks"):
            judge_packed(outcome((told("all"), told("pairs")), (told("all"),) * 2), Tally())


class TestLimit:
    def test_a_limit_on_uneven_tokens_is_no_excuse(self) -> None:
        """Who builds an exchange of packed sequences is fed with them, whatever it declares."""
        uneven = next(each for each in FED if each.name == "packed-sequences-uneven")
        assert broken([Limit("uneven_tokens", (False,), "equal T", proof="undefined")], uneven, "cpu") is None
