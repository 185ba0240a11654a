"""Settings that are accepted: what did not run is no pass, and what failed on one rank is a failure."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from moe_conformance.chapters.config_rules.judge.accepted_settings import judge_accepted
from moe_conformance.chapters.config_rules.workloads.accepted import RUN_RULES, accepted, of_rule
from moe_conformance.contract import Settings
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.overlapped.accepted import judge_options
from moe_conformance.judging.verdict import NotOffered, Raised, Tally, WrongForm
from moe_conformance.scenarios.accepted import SettingsRun
from moe_conformance.scenarios.graph_replays import counted_replays
from moe_conformance.scenarios.outcome import Outcome, RankOutcome

(WORKLOAD,) = accepted("alltoall", Layout(2, ep=2), "quick")
NOT_RUN = "no layer here has it"


def reading(became: Callable[[Settings, int], SettingsRun]) -> Reading:
    """Return a reading in which settings became this on a rank."""
    asked = [call.given[0]["asked"] for call in WORKLOAD.calls]
    ranks = tuple(RankOutcome(r, "ok", seen=tuple(became(settings, r) for settings in asked)) for r in range(2))
    return Reading(Outcome("simulated", WORKLOAD, ranks, 0.0), ranks)


def refused(settings: Settings, rank: int) -> SettingsRun:
    """Refuse everything."""
    return SettingsRun(settings, why="overlap = True is not supported")


def taken(settings: Settings, rank: int) -> SettingsRun:
    """Accept everything, and run nothing."""
    return SettingsRun(settings, settings, why=NOT_RUN)


class TestWhatDidNotRun:
    @pytest.mark.parametrize("rule", RUN_RULES)
    def test_accepted_alone_is_no_pass(self, rule: str) -> None:
        """A backend that resolves every setting to what was asked has shown nothing."""
        with pytest.raises(NotOffered, match=f"is accepted, .*{NOT_RUN}"):
            judge_accepted(reading(taken), rule, Tally())

    def test_refused_alone_is_no_pass_either(self) -> None:
        """The refusals are judged on the rule's own cases; here nothing has run."""
        with pytest.raises(NotOffered, match="all settings of RULE-08 are refused on two ranks"):
            judge_accepted(reading(refused), "RULE-08", Tally())

    def test_options_beside_overlap(self) -> None:
        """OVLP-15 has the same two answers."""
        with pytest.raises(NotOffered, match=f"of the options beside overlap none runs; .*{NOT_RUN}"):
            judge_options(reading(taken), Tally())
        with pytest.raises(NotOffered, match="of the options beside overlap none runs; all are refused"):
            judge_options(reading(refused), Tally())


class TestWhatFails:
    def test_an_error_behind_acceptance_is_told(self) -> None:
        """A refusal is one of `resolve`: what is accepted is built and runs."""

        def fails(settings: Settings, rank: int) -> SettingsRun:
            return SettingsRun(settings, settings, why="cannot be built: KeyError: 'moe'", failed=True)

        sentence = r"Settings\(ep=2, .*\) is accepted and cannot be built: KeyError"
        with pytest.raises(Raised, match=sentence):
            judge_accepted(reading(fails), "RULE-08", Tally())

    def test_one_rank_alone_does_not_run(self) -> None:
        """The others would wait for it."""

        def on_rank_0(settings: Settings, rank: int) -> SettingsRun:
            return SettingsRun(settings, settings, why=NOT_RUN) if rank else SettingsRun(settings, settings, seen=...)  # type: ignore[arg-type]

        with pytest.raises(WrongForm, match=f"runs on some ranks, and not on rank 1: {NOT_RUN}"):
            judge_accepted(reading(on_rank_0), "RULE-08", Tally())


class TestSettings:
    @pytest.mark.parametrize("rule", RUN_RULES)
    def test_every_rule_has_one_that_two_ranks_can_have(self, rule: str) -> None:
        """With ep = 2 and one stage."""
        found = of_rule(rule)
        assert found
        assert {(2, 1)} == {(settings.ep, settings.pp) for settings in found}


class TestReplays:
    def test_are_counted(self) -> None:
        """Each call of `replay` of any graph, within the block alone."""
        with patch.object(torch.cuda.CUDAGraph, "replay", lambda graph: None):
            graph = object.__new__(torch.cuda.CUDAGraph)
            with counted_replays() as replays:
                graph.replay()
                graph.replay()
            graph.replay()
        assert 2 == replays.count
