"""Floors, `compare` and `--against`: what passed must go on passing, and what was judged be judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_conformance import spec
from moe_conformance.report import floor, matrix
from moe_conformance.report.comparison import compare
from moe_conformance.report.problems import of_whole
from moe_conformance.report.records import CASE_CRASHED, Record, Verdict
from moe_conformance.report.standing import Standing, in_words, places, standings
from moe_conformance.waiving import Waivers
from moe_conformance.workloads.scripts import layout_names
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY

PLACE = ("EXCH-01", "alltoall", "ep2")


def record(verdict: Verdict, layout: str = "ep2", workload: str = "even", worst: float = 0.0) -> Record:
    """Return a record of EXCH-01 with alltoall."""
    node = f"test_x.py::test_x[alltoall-{layout}-{workload}]"
    place: dict[str, Any] = {"variant": "alltoall", "layout": layout, "workload": workload}
    return Record(node, "test_x", ("EXCH-01",), verdict, worst=worst, **place)


class TestStanding:
    def test_a_place_comes_to_its_worst_verdict(self) -> None:
        """All cases count, of those that passed the largest error; places come from requirement, variant and layout."""
        records = [record("pass", worst=0.25), record("pass", workload="uneven", worst=0.5), record("refused", "ep4")]
        found = standings([*records, record("waived", workload="odd", worst=9.0)])
        assert Standing("waived", 3, 3, 0.5) == found[PLACE]
        assert Standing("refused", 0, 1, 0.0) == found["EXCH-01", "alltoall", "ep4"]
        assert set(found) == places(records)
        assert "EXCH-01, alltoall on ep2" == in_words(PLACE)


class TestFloor:
    def written(self, folder: Path, *records: Record) -> floor.Floor:
        """Write the floor of a run, and read it."""
        path = folder / "toy.toml"
        path.write_text(floor.text(standings(records), layout_names(), {"toy": "1.0"}))
        return floor.read(path)

    def test_it_holds_what_passed(self, tmp_path: Path) -> None:
        """What failed, was waived or refused is not in it."""
        held = self.written(tmp_path, record("pass"), record("waived", "ep4"), record("refused", "single"))
        assert frozenset({PLACE}) == held.places
        assert {"toy": "1.0"} == held.versions

    @pytest.mark.parametrize("verdict", ["refused", "not adapted", "waived", "limit", "not kept"])
    def test_what_no_longer_passes_fell(self, tmp_path: Path, verdict: Verdict) -> None:
        """It says from what to what; a place without any record was not run."""
        held = self.written(tmp_path, record("pass"))
        assert [(PLACE, verdict)] == list(held.fallen([record(verdict)], held.places))
        assert [(PLACE, "not run")] == list(held.fallen([], held.places))
        assert [] == list(held.fallen([record("pass"), record(verdict, workload="odd")], held.places)) or (
            verdict in ("waived", "not kept")
        )
        sentence = floor.sentence(held.fallen([record(verdict)], held.places))
        assert f"below the floor in 1 places: EXCH-01, alltoall on ep2: {verdict} instead of pass" == sentence

    def test_it_is_that_of_the_same_release_or_commit(self) -> None:
        """Another patch of the library, or another torch, has the same floor; a commit has one of its own."""
        versions = {"toy": "1.0", "torch": "2.13.0"}
        held = floor.Floor(Path("toy.toml"), frozenset(), versions)
        assert all(held.is_of({**versions, **other}) for other in ({"toy": "1.0.3"}, {"torch": "2.15.0+cpu"}))
        assert not any(held.is_of({**versions, "toy": other}) for other in ("1.1", "2.0", "1.0+d98e8a64ddf3"))
        of_commit = floor.Floor(Path("toy.toml"), frozenset(), {"toy": "1.0+d98e8a64ddf3"})
        assert of_commit.is_of({"toy": "1.0+d98e8a64ddf3"})
        assert not any(of_commit.is_of({"toy": other}) for other in ("1.0", "1.0+d48bd6be0a85"))

    def test_a_run_of_another_version_is_told_which_there_are(self) -> None:
        """With all versions of each, since the library's alone may be the same."""
        floors = [
            floor.Floor(Path("toy.toml"), frozenset(), {"toy": "1.0", "torch": "2.13.0"}),
            floor.Floor(Path("toy@2.0.toml"), frozenset(), {"toy": "2.0"}),
        ]
        expected = "held to no floor: there are floors of toy 1.0 torch 2.13.0, of toy 2.0"
        assert expected == floor.of_other_versions(floors)

    def test_what_was_not_run_whole_is_not_looked_at(self, tmp_path: Path) -> None:
        """A narrowed run is held to its part; a failure is told by itself, and too few ranks are no regression."""
        held = self.written(tmp_path, record("pass"))
        assert [] == list(held.fallen([record("refused")], set()))
        assert [] == list(held.fallen([record("fail")], held.places))
        assert [] == list(held.fallen([record("not applicable")], held.places))
        assert [] == list(held.fallen([replace(record("not run"), kind=CASE_CRASHED)], held.places))
        assert "" == floor.sentence([])

    @pytest.mark.parametrize("text", ["[alltoall]\nEXCH-01 = 3\n", 'EXCH-01 = "ep2"\n', "versions = 1\n", "no toml"])
    def test_what_is_no_floor_is_refused(self, tmp_path: Path, text: str) -> None:
        """A file of another form cannot be ignored."""
        (tmp_path / "toy.toml").write_text(text)
        with pytest.raises(floor.Unreadable, match="the floor"):
            floor.read(tmp_path / "toy.toml")

    def test_every_floor_names_what_there_is(self) -> None:
        """Requirements are checked, and layouts exist; of a backend that is not importable here too."""
        from moe_conformance.spec.places import checked

        found = sorted(floor.FOLDER.glob("*.toml"))
        assert {"native", "megatron-core", "torchtitan", "transformers", "deepspeed"} <= set(floor.backends())
        for backend in floor.backends():
            floors = floor.of_backend(backend)
            assert f"{backend}.toml" == floors[0].path.name
            for one in floors:  # a run is held to one floor
                assert [one] == [other for other in floors if other.is_of(one.versions)]
        for path in found:
            held = floor.read(path)
            assert set() == {requirement for requirement, _, _ in held.places} - set(checked())
            assert set() == {layout for _, _, layout in held.places} - {*layout_names(), "any"}
            assert "torch" in held.versions


class TestCompare:
    def test_each_change_has_its_name(self) -> None:
        """New failures and what is no longer judged are regressions, the rest is told."""
        old = {
            "ep2": record("pass"), "ep4": record("pass", "ep4"), "single": record("fail", "single"),
            "ep2-edp2": record("refused", "ep2-edp2"), "ep2-etp2": record("pass", "ep2-etp2", worst=0.1),
        }  # fmt: skip
        new = {
            "ep2": record("fail"), "ep4": record("not adapted", "ep4"), "single": record("pass", "single"),
            "ep2-edp2": record("pass", "ep2-edp2"), "ep2-etp2": record("pass", "ep2-etp2", worst=0.3),
        }  # fmt: skip
        found = compare(standings(old.values()), standings(new.values()), whole=True)
        told = {name: [change.place[2] for change in changes] for name, changes in vars(found).items()}
        assert {
            "new_failures": ["ep2"],
            "no_longer_judged": ["ep4"],
            "mended": ["single"],
            "newly_judged": ["ep2-edp2"],
            "errors_grew": ["ep2-etp2"],
        } == told
        assert found.regressed
        assert "EXCH-01, alltoall on ep2-etp2: 0.1 of the allowed error -> 0.3 of the allowed error" in "\n".join(
            found.lines()
        )

    def test_nothing_differs(self) -> None:
        """A run is as good as itself; what a part does not have is not compared."""
        stands = standings([record("pass")])
        assert ["nothing differs"] == list(compare(stands, stands, whole=True).lines())
        assert not compare(stands, {}, whole=False).regressed
        assert compare(stands, {}, whole=True).regressed


class TestSpread:
    NOTHING = Waivers(None)

    def judged(self, *records: Record, spread: bool = True) -> list[str]:
        """Return what fails a whole run."""
        return list(of_whole(records, self.NOTHING, filtered=False, full=False, strict=False, spread=spread))

    def test_several_ranks_without_expert_parallelism_are_not_green(self) -> None:
        """Unless a layout with ep > 1 was judged, or the adapter says that it has a single rank."""
        (problem,) = self.judged(record("pass", "single"), record("refused", "ep2"))
        assert problem.startswith("nothing was judged on a layout with ep > 1")
        assert [] == self.judged(record("pass", "single"), record("pass", "tp2-ep2-edp2"))
        assert [] == self.judged(record("pass", "single"), record("refused", "ep2"), spread=False)

    def test_a_failure_is_told_once(self) -> None:
        """That nothing passed is no news where something failed."""
        assert ["no check passed"] == self.judged(record("refused", "ep2"))
        assert [] == self.judged(record("fail", "ep2"))


WORSE = f"""
from moe_conformance.contract import Unsupported
from {TOY.partition(":")[0]} import Toy, ToySession

class WorseSession(ToySession):
    def exchange(self, config):
        if self.topology.sizes["world"] > 1:
            raise Unsupported("expert parallelism is gone")
        return super().exchange(config)

class Worse(Toy):
    variants = ("right",)
    session_class = WorseSession

class Single(Worse):
    single_rank = True
"""
TWO_CHECKS = '''
"""Two checks of one place."""
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep

def even(workload):
    return workload.name == "even"

@requirement("EXCH-05", run=ExchangeStep(), when=even)
def test_outputs(reading, tally):
    """The output is right."""
    judge_outputs(reading, tally)

@requirement("EXCH-05", run=ExchangeStep(), when=even)
def test_again(reading, tally):
    """It is right again."""
    judge_outputs(reading, tally)
'''
SHOULD = '''
"""A check of a SHOULD."""
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep

def even(workload):
    return workload.name == "even"

@requirement("COST-05", run=ExchangeStep(), when=even)
def test_cost(reading, tally):
    """It fails where the output is wrong."""
    judge_outputs(reading, tally)
'''


class TestRuns:
    def judged(self, folder: Path, backend: str, *arguments: str, checks: str = str(PROJECT)) -> plugin_runs.Finished:
        """Judge a toy on two ranks."""
        given = ("--moe-backend", backend, "--moe-ranks", "2", *arguments)
        return plugin_runs.pytest_on(*given, "-o", "python_files=checks.py", checks, cwd=folder)

    def test_what_is_judged_no_more_is_a_regression(self, tmp_path: Path) -> None:
        """With --against, and by `compare`: the run of an adapter that refuses what it had fails."""
        (tmp_path / "worse.py").write_text(WORSE)
        assert 0 == self.judged(tmp_path, TOY, "-k", "right", "--moe-report", "old").status
        done = self.judged(tmp_path, "worse:Worse", "--moe-against", "old", "-k", "right", "--moe-report", "new")
        assert 1 == done.status
        assert "worse than old in 2 places: EXCH-05, right on ep2: pass -> not adapted" in done.output
        compared = plugin_runs.cli("compare", "old", "new", "--json", cwd=tmp_path)
        assert 1 == compared.status
        assert ["EXCH-05", "EXCH-09"] == [each["place"][0] for each in json.loads(compared.output)["no_longer_judged"]]
        assert 0 == plugin_runs.cli("compare", "new", "old", cwd=tmp_path).status
        missing = plugin_runs.cli("compare", "old", "nowhere", cwd=tmp_path)
        assert (2, True) == (missing.status, "there is no report in nowhere" in missing.output)

    @pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
    def test_a_place_of_which_a_part_ran_is_not_held(self, tmp_path: Path, workers: tuple[str, ...]) -> None:
        """What `-k` or a node id leaves out is not known to be worse, also where workers selected."""
        (tmp_path / "worse.py").write_text(WORSE)
        checks = tmp_path / "folder"
        checks.mkdir()
        (checks / "checks.py").write_text(TWO_CHECKS)
        assert 0 == self.judged(tmp_path, TOY, "-k", "right", "--moe-report", "old", checks=str(checks)).status
        held = ("--moe-against", "old", *workers)
        whole = self.judged(tmp_path, "worse:Worse", "-k", "right", *held, checks=str(checks))
        assert "worse than old in 1 places: EXCH-05, right on ep2: pass -> not adapted" in whole.output
        part = self.judged(tmp_path, "worse:Worse", "-k", "again and right", *held, checks=str(checks))
        assert "1 not adapted" in part.output
        assert "worse than" not in part.output
        item = f"{checks}/checks.py::test_again[right-ep2-even]"
        assert "worse than" not in self.judged(tmp_path, "worse:Worse", *held, checks=item).output

    def test_a_refusal_of_all_expert_parallelism_is_not_green(self, tmp_path: Path) -> None:
        """Though nothing failed; an adapter of a single rank says so, and passes."""
        (tmp_path / "worse.py").write_text(WORSE)
        done = self.judged(tmp_path, "worse:Worse")
        assert 1 == done.status
        assert "nothing was judged on a layout with ep > 1" in done.output
        assert 0 == self.judged(tmp_path, "worse:Single").status

    def test_a_should_fails_under_strict_alone(self, tmp_path: Path) -> None:
        """It is told as not kept, and does not change the exit status."""
        (tmp_path / "checks.py").write_text(SHOULD)
        done = self.judged(tmp_path, TOY, "-k", "wrong", checks=str(tmp_path))
        assert 1 == done.status
        assert "FAILS THE RUN: no check passed" in done.output
        done = self.judged(tmp_path, TOY, "-k", "wrong or right", "--moe-report", "told", checks=str(tmp_path))
        verdicts = plugin_runs.verdicts(plugin_runs.result(tmp_path / "told"))
        assert "not kept" == verdicts["test_cost[wrong-ep2-even]"]
        assert (0, "2 not kept") == (done.status, "2 not kept" if "2 not kept" in done.output else done.output)
        done = self.judged(tmp_path, TOY, "-k", "wrong or right", "--moe-strict", checks=str(tmp_path))
        assert 1 == done.status


class TestTold:
    def test_a_mixed_cell_says_its_share(self) -> None:
        """Of its cases, those that were judged in percent; a whole one and a failing one say nothing of that."""
        records = [record("pass"), *(record("refused", workload=f"w{n}") for n in range(3)), record("pass", "ep4")]
        asked = [spec.load()["EXCH-01"]]
        shown = matrix.matrix(asked, ["ep2", "ep4"], records, width=80, color=False, encoding="utf-8")
        (row,) = [line for line in shown.splitlines() if "EXCH-01" in line]
        assert ["EXCH-01", "✓", "25%", "✓"] == row.split()

    def test_how_much_was_judged_and_waived(self) -> None:
        """Of what was asked for and of all there is; of a requirement, the waived cases of those judged."""
        waived = replace(record("waived", workload="odd"), waiver="W-1")
        records = [record("pass"), waived, record("refused", "ep4")]
        assert "judged 1 of 2 requirements asked for, of 336 in all" == matrix.judged(
            records, ["EXCH-01", "EXCH-02"], 336
        )
        assert "waived, of the cases judged: EXCH-01 1 of 2 (W-1)" == matrix.waived(records)
        assert "" == matrix.waived([record("pass")])
