"""What an adapter excludes by its own word is the first line on a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_conformance.report.own_word import line, own_word
from moe_conformance.report.records import Record, Verdict
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import record

PASSED = {"exit": 0, "stopped": None}
MOVES = "moves rows"


def case(verdict: Verdict, *traits: str, layout: str = "ep2", id: str = "EXCH-01") -> Record:
    """Return a record of a workload with these traits."""
    return record(id, verdict, layout, traits=traits)


class TestShare:
    def test_all_that_was_judged_is_not_mentioned(self) -> None:
        """A refusal of the library is proved, and what is not applicable was not asked."""
        records = [case("pass", "float32", MOVES), case("refused", "bfloat16", MOVES), case("not applicable")]
        assert "passed" == line(PASSED, records)
        assert "passed" == line(PASSED, [])
        assert 100 == own_word([]).share

    def test_it_is_of_what_the_library_did_not_refuse(self) -> None:
        """Rounded down, so that 100 % is all; a run that failed or was stopped says it too."""
        records = [*(case("pass", "float32") for _ in range(2)), case("not adapted", "float32")]
        assert "passed, of 66 % of what it is asked" == line(PASSED, records)
        assert "failed, of 66 % of what it is asked" == line({"exit": 1, "stopped": None}, records)
        assert "stopped, of 66 % of what it is asked" == line({"exit": 143, "stopped": "SIGTERM"}, records)
        assert 99 == own_word([*(case("pass") for _ in range(999)), case("not adapted")]).share

    def test_few_judged_cases_do_not_read_like_many(self) -> None:
        """Of two adapters of a layer alone."""
        few, many = (
            [*(case("pass", MOVES) for _ in range(judged)), *(case("not adapted") for _ in range(305 - judged))]
            for judged in (6, 66)
        )
        assert ["passed, of 1 % of what it is asked", "passed, of 21 % of what it is asked"] == [
            line(PASSED, records) for records in (few, many)
        ]


class TestValues:
    def test_a_dtype_and_a_K_that_were_judged_nowhere_are_named(self) -> None:
        """All K above those that were judged as one; a dtype that was judged once is none."""
        records = [
            case("pass", "float32", "K=2", MOVES), case("limit", "bfloat16", "K=2", MOVES),
            case("not adapted", "float16", "K=8", MOVES), case("not adapted", "float32", "K=4", MOVES),
            case("not adapted", "float32", "K=1", MOVES),
        ]  # fmt: skip
        assert (
            "passed, of 20 % of what it is asked; by its own word not: bfloat16, float16, K = 1, K > 2; "
            "1 checks under limits that nothing proves"
        ) == line(PASSED, records)

    def test_what_routers_are_judged_by_does_not_hide_an_exchange(self) -> None:
        """A value of exchanges and layers is named as theirs."""
        records = [
            case("pass", "float32", MOVES, layout="single"), case("pass", "bfloat16", id="ROUTE-01"),
            case("not adapted", "bfloat16", MOVES), case("not adapted", "float32", "zero tokens", MOVES),
        ]  # fmt: skip
        assert "by its own word not: zero tokens, bfloat16 of exchanges and layers, ep > 1 of exchanges and layers" == (
            own_word(records).sentence
        )

    def test_an_adapter_of_routers_alone_excludes_exchanges(self) -> None:
        """In one word, not by their values."""
        records = [case("pass", "float32", id="ROUTE-01"), case("not adapted", "bfloat16", "K=3", MOVES)]
        assert ("exchanges and layers",) == own_word(records).values
        assert ("exchanges and layers", "float16") == own_word([*records, case("not adapted", "float16")]).values


CHECKS = '''
"""Checks of some cases of an exchange and of a router."""
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep, RouterStep

NAMES = {"even", "even-bfloat16", "even-float16", "top-all-even", "rank-without-tokens", "six-in-flight-even"}

def some(workload):
    return workload.name in NAMES

def softmax(workload):
    return workload.name == "route-softmax"

@requirement("EXCH-05", run=ExchangeStep(), when=some)
def test_outputs(reading, tally):
    """The output is right."""
    judge_outputs(reading, tally)

@requirement("ROUTE-01", run=RouterStep(), when=softmax)
def test_routes(reading, tally):
    """Every rank routes."""
    for rank in reading.ranks:
        assert "ok" == rank.status
        tally.add(pairs=1, rank=rank.rank)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with those checks, in which reports are written."""
    folder = tmp_path_factory.mktemp("excluded")
    (folder / "checks.py").write_text(CHECKS)
    return folder


def judged(folder: Path, backend: str, *options: str) -> plugin_runs.Finished:
    """Judge a backend on two ranks."""
    named = ("--moe-backend", f"self_tests.lying_backends.{backend}", "--moe-ranks", "2")
    return plugin_runs.pytest_on(*named, *options, "-o", "python_files=checks.py", str(folder), cwd=folder)


@pytest.fixture(scope="module")
def both(folder: Path) -> Path:
    """The report of a run with two variants, in which all passes."""
    assert 0 == judged(folder, "lying_limits:TwoVariants", "--moe-report", "both").status
    return folder / "both"


class TestRuns:
    def test_limits_that_nothing_proves_are_the_first_line(self, folder: Path) -> None:
        """The run passes of what is left, and says what is not."""
        done = judged(folder, "lying_limits:FourteenLimits")
        assert 0 == done.status
        told = "bfloat16, float16, K = 3, zero tokens, microbatches, in flight, uneven T of exchanges and layers"
        assert (
            f"passed, of 40 % of what it is asked; by its own word not: {told}; 6 checks under limits that "
            "nothing proves"
        ) in done.output

    def test_what_an_adapter_refuses_fails_with_strict_and_in_comparison(self, folder: Path, both: Path) -> None:
        """Though some of each place still passes."""
        done = judged(folder, "lying_limits:RefusesWhatItDoesWrongly", "--moe-strict", "--moe-report", "less")
        assert 1 == done.status
        assert "FAILS THE RUN: --strict allows no exclusion that nothing proves; by its own word not: " in done.output
        compared = plugin_runs.cli("compare", "both", "less", cwd=folder)
        assert (1, True) == (compared.status, "fewer pass: 2" in compared.output)

    def test_an_exchange_that_refuses_ep_beside_a_router_is_not_green(self, folder: Path) -> None:
        """The router was judged on ep2, and moves no rows there."""
        done = judged(folder, "lying_limits:RefusesAllOfEp")
        assert 1 == done.status
        assert "no exchange and no layer was judged on a layout with ep > 1" in done.output
        assert "1 checks of routers, losses or rules on such layouts move no rows" in done.output

    def test_a_limit_cannot_exclude_all_of_ep(self, folder: Path) -> None:
        """The run does not start, and the sentence says what to do."""
        done = judged(folder, "lying_limits:ExcludesAllOfEp")
        assert 4 == done.status
        assert "excludes all of ep > 1 from alltoall by a limit that nothing proves" in done.output

    def test_a_variant_that_is_gone_in_shards_is_seen_by_merge(self, folder: Path, both: Path) -> None:
        """No shard has it, and each passes; the whole is compared with an earlier report."""
        for shard in ("1/2", "2/2"):
            part = ("--moe-shard", shard, "--moe-report", f"part-{shard[0]}", "--moe-against", str(both))
            assert 0 == judged(folder, "lying_limits:OneVariantGone", *part).status
        merged = plugin_runs.cli("merge", "part-1", "part-2", "--report", "whole", "--against", "both", cwd=folder)
        assert 1 == merged.status
        assert "worse than both in 2 places: EXCH-05, allgather on ep2: pass -> not run" in merged.output
        assert 0 == plugin_runs.cli("merge", "part-1", "part-2", "--report", "alone", cwd=folder).status
