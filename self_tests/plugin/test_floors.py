"""Floors: what they hold, how they are written, and those that are installed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from moe_conformance import cli, spec
from moe_conformance.report import floor, floor_file, result
from moe_conformance.report.records import CASE_CRASHED, Record, Verdict
from moe_conformance.report.standing import standings
from moe_conformance.workloads.scripts import layout_names

PLACE = ("EXCH-01", "alltoall", "ep2")


FLOAT32, BFLOAT16 = ("float32", "K=2", "moves rows"), ("bfloat16", "K=2", "uneven T", "moves rows")


def record(
    verdict: Verdict, layout: str = "ep2", workload: str = "even", worst: float = 0.0, traits: tuple[str, ...] = ()
) -> Record:
    """Return a record of EXCH-01 with alltoall."""
    node = f"test_x.py::test_x[alltoall-{layout}-{workload}]"
    place: dict[str, Any] = {"variant": "alltoall", "layout": layout, "workload": workload}
    return Record(node, "test_x", ("EXCH-01",), verdict, worst=worst, traits=traits, **place)


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
