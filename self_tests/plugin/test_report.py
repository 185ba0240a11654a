"""What a run tells: verdicts of groups, failures told once, the matrix, result.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moe_conformance import spec
from moe_conformance.contract.topology import Layout
from moe_conformance.plugin.scheduling import cell_of
from moe_conformance.report import drawn, folding, matrix, not_run, result, summary
from moe_conformance.report.journal import NAME, Journal, read
from moe_conformance.report.records import (
    FAILING,
    PROPERTY,
    Record,
    Verdict,
    all_of_report,
    of_report,
    other_bits,
    overall,
)
from moe_conformance.waiving import Failure, Waiver
from self_tests.plugin.plugin_runs import record

SPEC = spec.load()
MOVED = {"rows": 3.0, "least_rows": 2.0, "bytes": 96.0, "least_bytes": 64.0, "calls": 2.0}


class TestRecord:
    def test_it_travels_as_json(self) -> None:
        """A record that went through JSON among other properties is the same record."""
        given = record("EXCH-01", "fail", blamed=(0, 3), compared={"elements": 4, "pairs": 0, "ranks": [0]})
        properties = [("other", 1), (PROPERTY, json.loads(json.dumps(given.to_json())))]
        assert given == of_report(properties)
        assert [given, given] == list(all_of_report([*properties, (PROPERTY, given)]))
        assert of_report([("other", 1)]) is None

    def test_the_command_that_judges_it_alone(self) -> None:
        """It is derived of the run's: the requirement and the item are added, in a shell's quotes."""
        assert "moe-conformance run --ranks 2 --only EXCH-01 -- -k 'test_EXCH-01[alltoall-ep2-even]'" == record(
            "EXCH-01", "fail"
        ).reproduce("moe-conformance run --ranks 2")

    def test_its_names(self) -> None:
        """The item is the node without its file, the case what stands in its brackets."""
        given = record("EXCH-01", "pass")
        assert ("test_EXCH-01[alltoall-ep2-even]", "alltoall-ep2-even") == (given.item, given.case)


class TestBits:
    RECORDS = (
        record("EXPT-08", "pass", bits=(12, 3)),
        record("EXPT-08", "pass", "ep4", bits=(8, 0)),
        record("EXCH-17", "pass", bits=(4, 0)),
        record("EXCH-01", "pass"),
    )

    def test_other_bits_are_a_fact(self) -> None:
        """They are added up over cases; a requirement that compares no two runs has no fact."""
        assert {"elements": 20, "other": 3} == other_bits(self.RECORDS[:2])
        assert other_bits(self.RECORDS[3:]) is None

    def test_one_line_tells_of_all(self) -> None:
        """Requirements with other bits come first."""
        said = "two runs compared: other bits, within rounding: EXPT-08 3 of 20 elements; equal bits: EXCH-17"
        assert said == summary.other_bits_line(self.RECORDS)
        assert "" == summary.other_bits_line(self.RECORDS[3:])

    def test_they_are_read_back(self) -> None:
        """From the columns of result.json."""
        assert list(self.RECORDS) == folding.unfold(folding.fold(self.RECORDS))


class TestDrawn:
    def test_totals_are_of_the_run(self) -> None:
        """By check, over all cells: what one cell did not draw another may have drawn."""
        records = drawing({"ties": 0, "idle rank": 2}, {"ties": 3})
        assert {"test_x": {"batches": 20, "ties": 3, "idle rank": 2}} == drawn.totals(records)
        assert [] == list(drawn.problems(records))
        assert "drawn: 20 batches; rarest of 2 features: idle rank 2, ties 3" == drawn.line(records)

    def test_what_no_cell_drew_fails_the_run(self) -> None:
        """The sentence names it."""
        (problem,) = drawn.problems(drawing({"ties": 0, "idle rank": 2}, {"ties": 0, "idle rank": 0}))
        assert problem.startswith("vacuous: of 20 batches that test_x drew, fewer than 1 had: ties;")

    def test_a_search_that_failed_need_not_have_gone_on(self) -> None:
        """Its cell is at fault already."""
        (failed,) = drawing({"ties": 0}, verdict="fail")
        assert [] == list(drawn.problems([failed]))

    def test_nothing_drawn_is_nothing_to_tell(self) -> None:
        """Runs of other checks have no such line."""
        assert drawn.line([record("EXCH-01", "pass")]) is None


def drawing(*counts: dict[str, int], verdict: Verdict = "pass") -> list[Record]:
    """Return the records of cells that drew ten batches each, with features counted."""
    return [record("EXCH-01", verdict, drawn={"batches": 10, **count}) for count in counts]


class TestOverall:
    @pytest.mark.parametrize(
        ("verdicts", "expected"),
        [
            ([], "not run"),
            (["pass", "refused"], "pass"),
            (["pass", "fail", "crash"], "fail"),
            (["pass", "hang"], "hang"),
            (["pass", "waived"], "waived"),
            (["not applicable", "refused"], "refused"),
            (["pass", "vacuous"], "vacuous"),
        ],
    )
    def test_failing_over_waived_over_passing_over_the_rest(self, verdicts: Sequence[Verdict], expected: str) -> None:
        """One failure fails the group; a pass counts if none failed; a waived failure shows over a pass."""
        assert expected == overall(verdicts)


class TestMatrix:
    RECORDS = (
        record("EXCH-01", "pass"),
        record("EXCH-01", "fail"),
        record("EXCH-01", "fail"),
        record("EXCH-02", "refused", "ep4"),
    )

    def shown(self, **changes: Any) -> str:
        """Return the matrix of the records, plain."""
        asked = {"width": 80, "color": False, "encoding": "utf-8", **changes}
        return matrix.matrix(
            [SPEC["EXCH-01"], SPEC["EXCH-02"], SPEC["EXCH-03"]], ("ep2", "tp2", "ep4"), self.RECORDS, **asked
        )

    def test_a_cell_says_how_many_failed(self) -> None:
        """A failing cell counts its failing items; a requirement without any item is not run anywhere."""
        rows = {line.split()[0]: line.split()[1:] for line in self.shown().splitlines() if "EXCH" in line}
        assert {"EXCH-01": ["✗2"], "EXCH-02": ["r"], "EXCH-03": ["·", "·"]} == rows

    def test_the_legend_explains_the_signs_that_occur(self) -> None:
        """And no others."""
        assert "✗ fail  r refused  · not run" == self.shown().splitlines()[-1].strip()

    def test_chapters_that_ran_have_a_row_each(self) -> None:
        """What failed has a row of its own below its chapter; the share of requirements that were judged is told."""
        rows = [line.split() for line in self.shown(whole=False).splitlines() if "EXCH" in line or " of " in line]
        assert [["exchange", "1", "of", "3", "✗" + "2", "r"], ["EXCH-01", "✗" + "2"]] == rows

    def test_ascii_is_enough(self) -> None:
        """A terminal that cannot show signs gets letters."""
        assert self.shown(encoding="ascii").isascii()
        assert "\x1b[" in self.shown(color=True)

    def test_the_manual_explains_every_sign(self) -> None:
        """docs/reading_a_verdict.md has a row per verdict, and says of each whether it fails the run."""
        manual = (Path(__file__).parents[2] / "docs" / "reading_a_verdict.md").read_text("utf-8")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in manual.splitlines() if "|" in line]
        told = {verdict: (sign, fails == "yes") for sign, verdict, _, fails in (row for row in rows if len(row) == 4)}
        shown = {verdict: (sign, verdict in FAILING) for verdict, (sign, _, _) in matrix.SIGNS.items()}
        assert shown == {verdict: told[verdict] for verdict in shown}

    def test_totals_name_failures_first(self) -> None:
        """Every item is counted under its verdict."""
        assert "2 fail, 1 pass, 1 refused" == matrix.totals(self.RECORDS)


class TestResult:
    def test_every_requirement_has_a_verdict(self, tmp_path: Path) -> None:
        """Those without a record too; numbers and times are those of the run."""
        start = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
        facts = result.Facts(
            "toy", {"torch": "2"}, "cpu", 4, "quick", "", "pytest", "again", start, start.replace(second=8), 1, 16
        )
        records = [record("EXCH-01", "fail", worst=0.5), record("EXCH-02", "pass", worst=0.25)]
        path = result.write(tmp_path, result.document(result.head(facts), list(SPEC.values()), records))
        content = json.loads(path.read_text("utf-8"))
        verdicts = {entry["id"]: entry["verdict"] for entry in content["requirements"]}
        assert {each: {"EXCH-01": "fail", "EXCH-02": "pass"}.get(each, "not run") for each in SPEC} == verdicts
        assert (8.0, 16, 1) == (content["seconds"], content["cases"], content["exit"])
        assert 0.25 == next(entry["worst"] for entry in content["requirements"] if entry["id"] == "EXCH-02")
        assert [Path("result.json")] == [each.relative_to(tmp_path) for each in tmp_path.iterdir()]

    def test_it_keeps_to_its_schema(self, tmp_path: Path) -> None:
        """What is written is what `result.schema.json` describes, and the schema's version is the writer's."""
        schema = json.loads(files("moe_conformance.report").joinpath("result.schema.json").read_text("utf-8"))
        waiver = Waiver(
            "T-01", ("EXCH-01",), ("*",), ("*",), ("*",), "it drops", "there", "me", date(2030, 1, 1), ("toy>=2",), "x",
            (Failure("WrongOutput", "combine", ("instead of",), 3.0), Failure("Died", "run", ("SIGSEGV",))),
        )  # fmt: skip
        start = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
        facts = result.Facts("toy", {}, "cpu", 4, "quick", "", "pytest", "again", start, waivers=(waiver,))
        content = result.document(result.head(facts), list(SPEC.values()), TestFolding.RECORDS)
        written = json.loads(result.write(tmp_path, content).read_text("utf-8"))
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(written, schema, jsonschema.Draft202012Validator)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(written | {"schema": result.SCHEMA + 1}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(written | {"unknown": 1}, schema)

    def test_a_report_is_read_back(self, tmp_path: Path) -> None:
        """The head, the requirements and the records; of a requirement with its counts, reasons and worst case."""
        start = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
        facts = result.Facts("toy", {}, "cpu", 4, "quick", "", "pytest", "again", start, start)
        records = [
            record("EXCH-01", "pass", worst=0.5),
            record("EXCH-01", "refused", "ep4", "no"),
            record("EXCH-01", "not run", "ep8"),
        ]
        head = result.head(facts)
        result.write(tmp_path, result.document(head, [SPEC["EXCH-01"]], records))
        report = result.read(tmp_path)
        assert {**head, "drawn": {}, "travelled": []} == report.head
        assert [*records[:2], *not_run.folded(records[2:])] == list(report.records)
        (line,) = report.requirements
        assert {"pass": 1, "refused": 1, "not run": 1} == line["cases"]
        assert {"refused": {"no": 1}} == line["reasons"]
        assert (0.5, "test_EXCH-01[alltoall-ep2-even]") == (line["worst"], line["worst_at"])

    def test_a_journal_is_read_back_without_its_torn_line(self, tmp_path: Path) -> None:
        """What was written before a kill is there; a line that was cut off is left out."""
        journal = Journal(tmp_path)
        records = [record("EXCH-01", "fail", blamed=(1,)), record("EXCH-02", "pass")]
        journal.write(records)
        with (tmp_path / NAME).open("a") as file:
            file.write('{"node": "test_x.py::te')
        assert records == read(tmp_path)
        journal.delete()
        assert [] == list(tmp_path.iterdir())


class TestFolding:
    RECORDS = (
        record("EXCH-01", "pass", worst=0.5, compared={"elements": 4, "pairs": 0, "ranks": [0, 1]}, runs=1),
        replace(record("EXCH-01", "pass", resolved={"exchange": "ring"}), workload="uneven", node="a.py::test_y[x]"),
        record("EXCH-01", "fail", message="combine: y is wrong", kind="WrongOutput", stage="combine", blamed=(1,)),
        record("EXCH-01", "fail", "ep4", message="combine: y is wrong", detail="printed", replay=("moe-conformance",)),
        record("EXCH-01", "pass", "ep4", travelled=MOVED, traits=("in flight",)),
        record("TRAIN-04", "pass", deviations={"loss": {"ratio": 0.5, "at": "step 1", "factor": ""}}),
        record("EXCH-02", "waived", message="waived by T-01: no", waiver="T-01"),
        Record("a.py::T::test_drawn[alltoall-ep2]", "test_drawn", ("EXCH-01", "EXCH-02"), "pass", variant="alltoall",
               layout="ep2", drawn={"batches": 3}),
        Record("a.py::test_groups[world-2]", "test_groups", ("GROUP-01",), "pass"),
        Record("a.py::test_sums", "test_sums", ("EXCH-01",), "not run", "stopped", cases=7),
    )  # fmt: skip

    def test_what_was_folded_is_read_back(self) -> None:
        """Every field of every record, through JSON."""
        content = json.loads(json.dumps(folding.fold(self.RECORDS)))
        assert list(self.RECORDS) == folding.unfold(content)

    def test_what_cases_share_is_written_once(self) -> None:
        """Cases that ended alike are one entry; what differs is a list, and what is the same is one value."""
        given = [
            replace(each, node=f"test_x.py::test_x[{each.case}]", runs=2)
            for pairs, name in enumerate(("even", "uneven", "idle"))
            for each in [replace(record("EXCH-01", "pass", compared=compared(pairs)), workload=name)]
        ]
        content = folding.fold(given)
        (entry,) = content["records"]
        assert (["even", "uneven", "idle"], [0, 1, 2]) == (content["workloads"], entry["workloads"])
        assert ([0, 1, 2], 2) == (entry["pairs"], entry["runs"])
        assert not {"elements", "worst", "message", "brackets"} & entry.keys()

    def test_a_thousand_passes_are_small(self) -> None:
        """A pass of a check on a case takes less than 16 bytes where nothing but the workload is its own."""
        given = [
            replace(record("EXCH-01", "pass"), workload=f"w{i}", node=f"test_x.py::test_x[alltoall-ep2-w{i}]")
            for i in range(1000)
        ]
        assert 16 * 1000 > len(json.dumps(folding.fold(given)))


class TestNotRun:
    def test_cases_are_counted_and_not_listed(self) -> None:
        """One record stands for the cases of a check in a cell; folded again it is the same."""
        given = [replace(record("EXCH-01", "not run", message="stopped"), workload=name) for name in "abc"]
        given += [record("EXCH-01", "not run", "ep4", "stopped")]
        found = not_run.folded(given)
        assert [("test_EXCH-01[alltoall-ep2]", 3), ("test_EXCH-01[alltoall-ep4]", 1)] == [
            (each.item, each.cases) for each in found
        ]
        assert found == not_run.folded(found)
        assert "4 not run" == matrix.totals(found)

    @pytest.mark.parametrize(
        ("requirement", "changes", "records", "reason"),
        [
            ("EXCH-01", {}, [record("EXCH-01", "pass")], ""),
            ("EXCH-01", {"only": ["EXCH-02"]}, [], "left out by --only"),
            ("EXCH-01", {"filtered": True}, [], "left out by -k, -m or the paths that were given"),
            ("EXCH-01", {"shard": "1/2"}, [], "all of its cases are in other shards"),
            ("EXCH-01", {"stopped": "killed"}, [], "not selected yet: killed"),
            ("EXCH-01", {}, [], "it has no case in the profile quick"),
            ("EXCH-01", {}, [record("EXCH-01", "not run", message="not run: killed")], "1 cases: not run: killed"),
        ],
    )
    def test_every_requirement_says_why(
        self, requirement: str, changes: Any, records: Sequence[Record], reason: str
    ) -> None:
        """In one sentence; what waits for a check says for what."""
        head = {"only": [], "filtered": False, "shard": None, "stopped": None, "profile": "quick"} | changes
        assert reason == not_run.reasons(SPEC[requirement], head, records)
        expected = "there is no check yet: needs a GPU to capture graphs on"
        assert expected == not_run.reasons(SPEC["GRAPH-01"], head, [])


def compared(pairs: int) -> dict[str, object]:
    """Return what a check has compared that counted pairs on one rank."""
    return {"elements": 0, "pairs": pairs, "ranks": [0]}


class TestScheduling:
    def test_the_longest_cell_holds_the_item(self) -> None:
        """`ep2-edp2` is another cell than `ep2`; what is in none is a scope of its own."""
        cells = ["alltoall-ep2", "alltoall-ep2-edp2", "alltoall-single", Layout(2, ep=2).name]
        assert "alltoall-ep2-edp2" == cell_of("a.py::test_x[alltoall-ep2-edp2-even]", cells)
        assert "alltoall-ep2" == cell_of("a.py::test_x[alltoall-ep2-even]", cells)
        assert "alltoall-ep2" == cell_of("a.py::test_x[alltoall-ep2]", cells)
        assert "a.py::test_y" == cell_of("a.py::test_y", cells)
