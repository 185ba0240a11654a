"""Floors, `compare` and `--against`: what passed must go on passing, and what was judged be judged."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from moe_conformance import cli, spec
from moe_conformance.report import floor, floor_file, matrix, result
from moe_conformance.report.comparison import compare
from moe_conformance.report.problems import of_whole
from moe_conformance.report.records import CASE_CRASHED, Record, Verdict
from moe_conformance.report.standing import in_words, places, standings
from moe_conformance.waiving import Waivers
from moe_conformance.workloads.scripts import layout_names
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import PROJECT, TOY

PLACE = ("EXCH-01", "alltoall", "ep2")


FLOAT32, BFLOAT16 = ("float32", "K=2", "moves rows"), ("bfloat16", "K=2", "uneven T", "moves rows")


def record(
    verdict: Verdict, layout: str = "ep2", workload: str = "even", worst: float = 0.0, traits: tuple[str, ...] = ()
) -> Record:
    """Return a record of EXCH-01 with alltoall."""
    node = f"test_x.py::test_x[alltoall-{layout}-{workload}]"
    place: dict[str, Any] = {"variant": "alltoall", "layout": layout, "workload": workload}
    return Record(node, "test_x", ("EXCH-01",), verdict, worst=worst, traits=traits, **place)


class TestStanding:
    def test_a_place_comes_to_its_worst_verdict(self) -> None:
        """All cases count, of those that passed the largest error; places come from requirement, variant and layout."""
        records = [record("pass", worst=0.25), record("pass", workload="uneven", worst=0.5), record("refused", "ep4")]
        found = standings([*records, record("waived", workload="odd", worst=9.0)])
        stands = found[PLACE]
        assert ("waived", 3, 3, 0.5) == (stands.verdict, stands.judged, stands.cases, stands.worst)
        assert (2, {"pass": 2, "waived": 1}) == (stands.passed, stands.count)
        assert "refused" == found["EXCH-01", "alltoall", "ep4"].verdict
        assert set(found) == places(records)
        assert "EXCH-01, alltoall on ep2" == in_words(PLACE)

    def test_what_passed_is_counted_by_trait(self) -> None:
        """By dtype, K and conditions; whether rows are moved is no trait to count by."""
        records = [record("pass", traits=BFLOAT16), record("pass", workload="odd", traits=FLOAT32)]
        found = standings([*records, record("refused", workload="even-2", traits=FLOAT32)])
        assert {"bfloat16": 1, "float32": 1, "K=2": 2, "uneven T": 1} == found[PLACE].traits

    def test_a_failure_under_another_requirement_is_told_in_all_places_of_its_check(self) -> None:
        """A crash is reported under EXCH-09, and is not missing among the cases of EXCH-01."""
        crash = replace(record("crash", workload="odd"), requirements=("EXCH-09",))
        found = standings([record("pass"), crash])
        assert (1, 1, 2) == (found[PLACE].passed, found[PLACE].told, found[PLACE].reached)
        assert (0, 1) == (found["EXCH-09", "alltoall", "ep2"].passed, found["EXCH-09", "alltoall", "ep2"].told)


class TestFloor:
    HEAD: ClassVar = {"versions": {"toy": "1.0"}, "device": "cpu", "profile": "quick"}

    def written(self, folder: Path, *records: Record) -> floor.Floor:
        """Write the floor of a run, and read it."""
        path = folder / "toy.toml"
        path.write_text(floor_file.text(standings(records), layout_names(), self.HEAD))
        return floor_file.read(path)

    def told(self, held: floor.Floor, *records: Record) -> list[str]:
        """Return what a whole run of these records is told."""
        return list(held.sentences(standings(records), held.places))

    def test_it_holds_how_much_passed(self, tmp_path: Path) -> None:
        """What failed, was waived or refused is not in it, what passes beside a waived case is."""
        both = record("pass", "ep4"), record("waived", "ep4", "odd")
        held = self.written(
            tmp_path, record("pass"), record("pass", workload="odd"), *both, record("refused", "single")
        )
        assert {PLACE: 2, ("EXCH-01", "alltoall", "ep4"): 1} == held.places
        assert ({"toy": "1.0"}, "cpu", "quick") == (held.versions, held.device, held.profile)
        text = (tmp_path / "toy.toml").read_text()
        assert '[passes."alltoall"]\nEXCH-01 = "2 ep2 1 ep4"\n' in text

    def test_it_holds_the_rarer_dtypes_and_all_conditions(self, tmp_path: Path) -> None:
        """The most frequent dtype and K are left out; traits are written without spaces."""
        records = [record("pass", workload=f"w{n}", traits=FLOAT32) for n in range(3)]
        held = self.written(tmp_path, *records, record("pass", traits=BFLOAT16))
        assert {"EXCH-01": {"bfloat16": 1, "uneven T": 1}} == held.traits
        assert '[traits]\nEXCH-01 = "1 bfloat16 1 uneven-T"\n' in (tmp_path / "toy.toml").read_text()

    @pytest.mark.parametrize("verdict", ["refused", "not adapted", "waived", "limit", "not kept"])
    def test_what_no_longer_passes_fell(self, tmp_path: Path, verdict: Verdict) -> None:
        """It says from what to what; a place without any record was not run, and more is no fall."""
        held = self.written(tmp_path, record("pass"), record("pass", workload="odd"))
        gone = record(verdict), record(verdict, workload="odd")
        assert [
            f"below the floor in 1 places, by 2 passes: EXCH-01, alltoall on ep2: {verdict} instead of 2 passes"
        ] == self.told(held, *gone)
        assert [
            "below the floor in 1 places, by 2 passes: EXCH-01, alltoall on ep2: not run instead of pass"
        ] == self.told(held)
        assert [
            f"below the floor in 1 places, by 1 passes: EXCH-01, alltoall on ep2: 1 of 2 pass, 1 {verdict}"
        ] == self.told(held, record("pass"), gone[1])
        more = record("pass"), record("pass", workload="even-2"), record("pass", workload="odd")
        assert [] == self.told(held, *more, record(verdict, workload="even-3"))

    def test_a_dtype_that_others_stand_in_for_fell(self, tmp_path: Path) -> None:
        """As many pass in the place, and none of them in bfloat16."""
        records = [record("pass", workload=f"w{n}", traits=FLOAT32) for n in range(3)]
        held = self.written(tmp_path, *records, record("pass", traits=BFLOAT16))
        found = [*records, record("pass", traits=FLOAT32)]
        assert [
            "below the floor in 2 traits: bfloat16: 0 of 1 pass, in EXCH-01; uneven T: 0 of 1 pass, in EXCH-01"
        ] == self.told(held, *found)
        assert [] == list(held.sentences(standings(found), held.places.keys() - {PLACE}))

    def test_a_failure_is_told_once(self, tmp_path: Path) -> None:
        """A case that fails, or was not run since it crashed, is no fall; nor are layouts of more ranks."""
        held = self.written(tmp_path, record("pass", traits=BFLOAT16), record("pass", workload="odd", traits=FLOAT32))
        assert [] == self.told(held, record("fail"), record("pass", workload="odd"))
        assert [] == self.told(held, replace(record("not run"), kind=CASE_CRASHED, cases=2))
        assert [] == self.told(held, record("not applicable"), record("not applicable", workload="odd"))
        assert [] == list(held.sentences(standings([record("refused")]), set()))

    def test_what_becomes_not_applicable_by_design_fell(self, tmp_path: Path) -> None:
        """Unlike layouts of more ranks than the run has: it is the adapter that says so."""
        held = self.written(tmp_path, record("pass", traits=BFLOAT16))
        designed = replace(record("not applicable"), message="not applicable by design: the library spreads no experts")
        assert [
            "below the floor in 1 places, by 1 passes: EXCH-01, alltoall on ep2: not applicable instead of 1 pass",
            "below the floor in 1 traits: uneven T: 0 of 1 pass, in EXCH-01",
        ] == self.told(held, designed)

    def test_a_floor_without_counts_holds_places(self, tmp_path: Path) -> None:
        """As it was written before: something passes there, and all that is judged does."""
        (tmp_path / "toy.toml").write_text('versions = {"toy" = "1.0"}\n\n["alltoall"]\nEXCH-01 = "ep2 ep4"\n')
        held = floor_file.read(tmp_path / "toy.toml")
        assert (dict.fromkeys((PLACE, ("EXCH-01", "alltoall", "ep4")), 0), {}) == (held.places, held.traits)
        passing = record("pass"), record("pass", "ep4")
        assert [] == self.told(held, *passing, record("not adapted", workload="odd"))
        assert ["below the floor in 1 places: EXCH-01, alltoall on ep2: waived instead of pass"] == self.told(
            held, *passing, record("waived", workload="odd")
        )

    def test_it_is_that_of_the_same_release_or_commit(self) -> None:
        """Another patch of the library, or another torch, has the same floor; a commit has one of its own."""
        versions = {"toy": "1.0", "torch": "2.13.0"}
        held = floor.Floor(Path("toy.toml"), {}, versions=versions)
        assert all(held.is_of({**versions, **other}) for other in ({"toy": "1.0.3"}, {"torch": "2.15.0+cpu"}))
        assert not any(held.is_of({**versions, "toy": other}) for other in ("1.1", "2.0", "1.0+d98e8a64ddf3"))
        of_commit = floor.Floor(Path("toy.toml"), {}, versions={"toy": "1.0+d98e8a64ddf3"})
        assert of_commit.is_of({"toy": "1.0+d98e8a64ddf3"})
        assert not any(of_commit.is_of({"toy": other}) for other in ("1.0", "1.0+d48bd6be0a85"))

    def test_it_is_of_a_device_and_a_profile(self) -> None:
        """A full run is held to the places of the quick floor, uncounted, unless it has one of its own."""
        versions = {"toy": "1.0"}
        quick = floor.Floor(Path("toy.toml"), {PLACE: 3}, {"EXCH-01": {"bfloat16": 1}}, versions)
        full = replace(quick, profile="full")
        assert quick == floor.chosen([full, quick], versions, "cpu", "quick")
        assert full == floor.chosen([full, quick], versions, "cpu", "full")
        assert replace(quick, places={PLACE: 0}, traits={}) == floor.chosen([quick], versions, "cpu", "full")
        others = [("cuda", "quick"), ("cpu", "virtual"), ("cpu", "smoke")]
        assert [None, None, None] == [floor.chosen([quick, full], versions, *other) for other in others]

    def test_a_run_that_none_is_for_is_told_which_there_are(self) -> None:
        """With all versions of each, since the library's alone may be the same."""
        floors = [
            floor.Floor(Path("toy.toml"), {}, versions={"toy": "1.0", "torch": "2.13.0"}),
            floor.Floor(Path("toy@2.0-cuda.toml"), {}, versions={"toy": "2.0"}, device="cuda"),
        ]
        expected = (
            "held to no floor: none is for this version, full on cuda; there are floors of toy 1.0 torch 2.13.0, quick "
            "on cpu; toy 2.0, quick on cuda"
        )
        assert expected == floor.elsewhere(floors, "cuda", "full")

    def test_a_new_floor_has_a_file_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Named after the version, the device and the profile where these are not the usual ones."""
        monkeypatch.setattr(floor_file, "FOLDER", tmp_path)

        def path(versions: dict[str, str], device: str, profile: str) -> str:
            return floor_file.path_to_write("toy", versions, device, profile).name

        assert "toy.toml" == path({"toy": "1.0"}, "cpu", "quick")
        self.written(tmp_path, record("pass"))
        assert ["toy.toml", "toy@2.0.toml", "toy@cuda.toml", "toy@2.0-cuda-full.toml"] == [
            path({"toy": "1.0.1"}, "cpu", "quick"), path({"toy": "2.0"}, "cpu", "quick"),
            path({"toy": "1.0"}, "cuda", "quick"), path({"toy": "2.0"}, "cuda", "full"),
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "text",
        [
            "[alltoall]\nEXCH-01 = 3\n", 'EXCH-01 = "ep2"\n', "versions = 1\n", "no toml", "passes = 1\n",
            '[passes.alltoall]\nEXCH-01 = "ep2"\n', '[passes.alltoall]\nEXCH-01 = "0 ep2"\n', "passes = {a = 1}\n",
            'device = 1\n[passes.alltoall]\nEXCH-01 = "1 ep2"\n', '[passes]\n[traits]\nEXCH-01 = 2\n',
            '[passes.alltoall]\n[alltoall]\nEXCH-01 = "ep2"\n', "traits = " + 2000 * "[" + 2000 * "]",
        ],
    )  # fmt: skip
    def test_what_is_no_floor_is_refused(self, tmp_path: Path, text: str) -> None:
        """A file of another form cannot be ignored."""
        (tmp_path / "toy.toml").write_text(text)
        with pytest.raises(floor_file.Unreadable, match="the floor"):
            floor_file.read(tmp_path / "toy.toml")

    def test_every_floor_names_what_there_is(self) -> None:
        """Requirements are checked, and layouts exist; of a backend that is not importable here too."""
        from moe_conformance.spec.places import checked

        found = sorted(floor_file.FOLDER.glob("*.toml"))
        assert {"native", "megatron-core", "torchtitan", "transformers", "deepspeed"} <= set(floor_file.backends())
        for backend in floor_file.backends():
            floors = floor_file.of_backend(backend)
            assert f"{backend}.toml" == floors[0].path.name
            for one in floors:  # a run is held to one floor
                assert one.path == floor_file.path_to_write(backend, one.versions, one.device, one.profile)
        for path in found:
            held = floor_file.read(path)
            assert set() == {requirement for requirement, _, _ in held.places} - set(checked())
            assert set() == {layout for _, _, layout in held.places} - {*layout_names(), "any"}
            assert "torch" in held.versions


class TestFloorCommand:
    def report(self, folder: Path, *records: Record, **changes: Any) -> Path:
        """Write the report of a whole quick run of a toy."""
        begun = datetime(2026, 1, 1, tzinfo=UTC)
        facts = result.Facts(
            "toy",
            {"toylib": "2"},
            "cpu",
            4,
            "quick",
            "",
            "pytest",
            "again",
            begun,
            begun,
            0,
            interrupted=False,
            stopped="",
        )
        head = result.head(replace(facts, **{"variants": ("alltoall",), **changes}))
        folder.mkdir()
        result.write(folder, result.document(head, tuple(spec.load().values()), records))
        return folder

    @pytest.fixture
    def floors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The folder of floors, empty."""
        monkeypatch.setattr(floor_file, "FOLDER", tmp_path)
        return tmp_path

    def told(self, report: Path) -> tuple[int, str]:
        """Return the status of the command, and its output in one line."""
        done = CliRunner().invoke(cli.main, ["floor", "--backend", "toy", "--report", str(report)])
        return done.exit_code, " ".join(done.output.split())

    def test_it_writes_what_a_report_passes(self, floors: Path) -> None:
        """With the device and the profile in the head; that the run failed is told."""
        status, told = self.told(self.report(floors / "one", record("pass"), profile="full", exit=1))
        assert (0, True) == (status, told.endswith("before you commit it; the run failed, and what failed is not held"))
        held = floor_file.read(floors / "toy@full.toml")
        assert ({PLACE: 1}, "full", "cpu") == (held.places, held.profile, held.device)

    def test_a_selection_that_is_behind_is_refused(self, floors: Path) -> None:
        """The workload runs wherever it can until it is selected: the floor would hold all of these cases."""
        status, told = self.told(self.report(floors / "one", record("pass"), record("pass", workload="quite-new")))
        assert 2 == status
        assert "the stored selection does not know 1 workloads, such as quite-new: run `python -m tools.select" in told
        assert [] == list(floors.glob("*.toml"))

    @pytest.mark.parametrize(
        "part", [{"filtered": True}, {"shard": "1/2"}, {"profile": "smoke"}, {"ranks": 2}, {"plant": "bug"}]
    )
    def test_a_part_of_a_run_is_refused(self, floors: Path, part: dict[str, Any]) -> None:
        """Less would be held than passes."""
        status, told = self.told(self.report(floors / "one", record("pass"), **part))
        assert (2, True) == (status, "a floor needs a whole run of toy" in told)


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
            "fewer_pass": [],
            "mended": ["single"],
            "newly_judged": ["ep2-edp2"],
            "errors_grew": ["ep2-etp2"],
        } == told
        assert found.regressed
        assert "EXCH-01, alltoall on ep2-etp2: 0.1 of the allowed error -> 0.3 of the allowed error" in "\n".join(
            found.lines()
        )

    def test_fewer_that_pass_are_a_regression(self) -> None:
        """Of all, or of a trait, though the place passes; not where the run was narrowed, and not what fails."""
        old = [record("pass", traits=FLOAT32), record("pass", workload="odd", traits=BFLOAT16)]
        new = [old[0], record("not adapted", workload="odd", traits=BFLOAT16)]
        found = compare(standings(old), standings(new), whole=True)
        fell = "2 pass, 2 K=2, 1 bfloat16, 1 uneven T -> 1 pass, 1 K=2, 0 bfloat16, 0 uneven T"
        assert [f"EXCH-01, alltoall on ep2: {fell}"] == [str(change) for change in found.fewer_pass]
        assert found.regressed
        assert found.sentence("old") == f"worse than old in 1 places: EXCH-01, alltoall on ep2: {fell}"
        other = compare(standings(old), standings([old[0], record("pass", traits=FLOAT32)]), whole=True)
        assert ["1 bfloat16, 1 uneven T"] == [change.before for change in other.fewer_pass]
        assert not compare(standings(old), standings(new), whole=True, counts=False).regressed
        failing = compare(standings(old), standings([old[0], record("fail", workload="odd")]), whole=True)
        assert (1, 0) == (len(failing.new_failures), len(failing.fewer_pass))
        assert "" == compare(standings(new), standings(old), whole=True).sentence("old")

    def test_nothing_differs(self) -> None:
        """A run is as good as itself; what a part does not have is not compared."""
        stands = standings([record("pass")])
        assert ["nothing differs"] == list(compare(stands, stands, whole=True).lines())
        assert not compare(stands, {}, whole=False).regressed
        assert compare(stands, {}, whole=True).regressed


class TestSpread:
    NOTHING = Waivers(None)

    def judged(self, *records: Record, spread: bool = True, strict: bool = False) -> list[str]:
        """Return what fails a whole run."""
        return list(of_whole(records, self.NOTHING, filtered=False, full=False, strict=strict, spread=spread))

    def test_several_ranks_without_expert_parallelism_are_not_green(self) -> None:
        """Unless an exchange or a layer was judged on ep > 1, or the adapter says that it has a single rank."""
        (problem,) = self.judged(record("pass", "single"), record("refused", "ep2", traits=FLOAT32))
        assert problem.startswith("no exchange and no layer was judged on a layout with ep > 1")
        moved = record("pass", "tp2-ep2-edp2", traits=FLOAT32)
        assert [] == self.judged(record("pass", "single"), moved)
        assert [] == self.judged(record("pass", "single"), record("refused", "ep2"), spread=False)

    def test_routers_beside_an_exchange_that_refuses_ep_are_not_enough(self) -> None:
        """Nor are losses and rules on a layout of that name: they move no rows."""
        router = [record("pass", "ep2", f"route-{n}", traits=("float32", "K=2")) for n in range(3)]
        (problem,) = self.judged(
            record("pass", "single", traits=FLOAT32), record("not adapted", traits=FLOAT32), *router
        )
        assert problem.endswith("; 3 checks of routers, losses or rules on such layouts move no rows")

    def test_a_failure_is_told_once(self) -> None:
        """That nothing passed is no news where something failed."""
        assert ["no check passed"] == self.judged(record("refused", "ep2"))
        assert [] == self.judged(record("fail", "ep2"))

    def test_exclusions_fail_under_strict(self) -> None:
        """A value that was judged nowhere, and a limit that nothing proves; a refusal of the library is proved."""
        kept = record("pass", traits=FLOAT32), record("refused", "single", traits=BFLOAT16)
        assert [] == self.judged(*kept, strict=True)
        for verdict in ("not adapted", "limit"):
            excluded = record(verdict, workload="odd", traits=BFLOAT16)
            assert [] == self.judged(*kept, excluded)
            (problem,) = self.judged(*kept, excluded, strict=True)
            assert problem.startswith("--strict allows no exclusion that nothing proves; by its own word not: bfloat16")


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
        assert "no exchange and no layer was judged on a layout with ep > 1" in done.output
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
