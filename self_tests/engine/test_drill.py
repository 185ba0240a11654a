"""Every injected fault gets the required verdict, blame and evidence, and the engine works afterwards."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from moe_conformance import cli
from moe_conformance.engine.drill import FAULTS, Drill, table
from moe_conformance.engine.drill.faults import Fault
from moe_conformance.engine.drill.injection import Injection, groups

WORLDS = (2, 4)
BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def drill() -> Iterator[Drill]:
    """One engine for all faults, so that every fault must leave it usable."""
    with Drill(WORLDS) as drill:
        yield drill


class TestFaults:
    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
    def test_the_engine_says_and_leaves_what_it_must(self, drill: Drill, fault: Fault) -> None:
        """Verdict, blame, statuses, stacks, ledgers, the healthy job and leaks are right in worlds of 2 and of 4."""
        turn = FAULTS.index(fault)  # another faulty rank for each
        wrong = {world: drill.inject(Injection(fault, world, turn)).wrong for world in WORLDS}
        assert dict.fromkeys(WORLDS, ()) == wrong

    def test_each_collective_fault_is_played_on_a_group_too(self) -> None:
        """In a world of 4 one rank is not in the group."""
        on_groups = [fault for fault in FAULTS if fault.scope == "group"]
        on_the_world = [
            fault.job for fault in FAULTS if fault.scope == "world" and fault.job.startswith("collectives:")
        ]
        assert on_the_world == [fault.job for fault in on_groups]
        assert (0, 1, 3) == Injection(on_groups[0], 4, 0).members
        assert {"most": ((0, 1, 3),), "halves": ((0, 1), (2, 3))} == groups(4)


class TestExpectations:
    @pytest.mark.parametrize(
        ("name", "change", "sentence"),
        [
            ("exception on one rank", {"verdict": ("hang",)}, "verdict crash, not hang"),
            ("exception on one rank", {"blamed": "everyone"}, "blamed (1,), not (0, 1)"),
            (
                "exception on one rank",
                {"faulty": ("died",)},
                "rank 1 (faulty): raised, not died: ValueError: drilled",
            ),
            ("exception on one rank", {"peers": ("ok",)}, "rank 0 (partner): raised, not ok: "),
            ("exception on one rank", {"says": "KeyError"}, "rank 1 (faulty): error 'ValueError: drilled' because of"),
            ("exception on one rank", {"calls": ("", "all_reduce all_reduce")}, "made the calls 'all_reduce', not ''"),
            ("exception on one rank", {"disagrees": True}, "disagreements []"),
            ("os._exit", {"stacks": True}, "rank 1 (faulty): died without a stack"),
            ("thread left behind", {"says": "fork"}, "rank 1 (faulty): left (\"thread 'left-behind'\",), not 'fork'"),
            ("one row more expected", {"disagrees": False}, "disagreements ['on group (0, 1) call 2"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_an_engine_that_says_otherwise_is_wrong(
        self, drill: Drill, name: str, change: dict[str, Any], sentence: str
    ) -> None:
        """Every expectation is compared with the result: if one is changed, the trial reports it."""
        fault = replace(BY_NAME[name], **change)
        wrong = drill.inject(Injection(fault, world=2, turn=1)).wrong
        assert sentence in wrong[0]


class TestLeaks:
    def test_a_descriptor_is_told_once(self, drill: Drill) -> None:
        """A descriptor more than before is reported, and one less too."""
        injection = Injection(BY_NAME["unpicklable result"], 2, 0)
        descriptor = os.open(os.devnull, os.O_RDONLY)
        try:
            (told,) = drill.inject(injection).wrong
            assert told.startswith("driver_descriptors: ")
            assert () == drill.inject(injection).wrong
        finally:
            os.close(descriptor)
        assert 1 == len(drill.inject(injection).wrong)

    def test_a_process_and_then_a_zombie_is_told(self, drill: Drill) -> None:
        """A process with the engine's mark is reported as a leak, and as a zombie once it has exited."""
        injection = Injection(BY_NAME["unpicklable result"], 2, 0)
        variable, _, value = drill.mark.partition("=")
        process = subprocess.Popen(["sleep", "600"], env={variable: value})
        try:
            (told,) = drill.inject(injection).wrong
            assert told.startswith("processes: ")
            assert str(process.pid) in told
        finally:
            process.kill()
            processes, zombies = drill.inject(injection).wrong
            process.wait()
        assert (processes.split(":")[0], zombies.split(":")[0]) == ("processes", "zombies")
        assert [told.split(":")[0] for told in drill.inject(injection).wrong] == ["zombies"]


class TestTable:
    def test_one_playing_names_ranks_and_several_the_rule(self, drill: Drill) -> None:
        """The table names the ranks of one trial, and the rule of several, with least, median and greatest times."""
        injection = Injection(BY_NAME["one row more expected"], 2, 0)
        first = replace(drill.inject(injection), report_s=0.5, next_s=0.25)
        second = replace(first, report_s=1.5, wrong=("something",))
        expected = "| one row more expected | 2     | fail    | 0 and 1 | 0.50     | 0.25        | yes   |"
        assert expected == table([first])[-1]
        expected = (
            "| one row more expected | 2     | fail    | pair    | 0.50 / 1.00 / 1.50 | 0.25 / 0.25 / 0.25 | 1 of 2 |"
        )
        assert expected.split() == table([first, second])[-1].split()


class TestCommand:
    @pytest.mark.parametrize("ranks", ["3", "2,5", "0", "two", ""])
    def test_worlds_that_cannot_be_drilled_are_refused(self, ranks: str) -> None:
        """Halves need an even number of ranks."""
        result = CliRunner().invoke(cli.main, ["doctor", "--drill", "--ranks", ranks])
        assert (2, True) == (result.exit_code, "--drill needs even numbers of ranks" in result.output)
