"""Reports put together: what is missing, double or contradictory is told, and what is not of one run is refused."""

from __future__ import annotations

import doctest
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moe_conformance import cli, spec
from moe_conformance.report import floor_file, merge, result
from moe_conformance.report.journal import Journal
from moe_conformance.report.records import Record, Verdict
from moe_conformance.waiving import Failure, Waiver
from moe_conformance.workloads.selection import shards

ENTRY = {"check": 0, "requirements": ["EXCH-01"], "verdict": "pass", "workloads": [0]}
START = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
FACTS = result.Facts(
    "toy", {"toylib": "2"}, "cpu", 2, "quick", "", "pytest", "moe-conformance run", START, START.replace(second=8), 0,
    interrupted=False, stopped="",
)  # fmt: skip


def record(layout: str, verdict: Verdict, workload: str = "even", **more: Any) -> Record:
    """Return how a check ended on one case of an exchange."""
    node = f"test_x.py::test_x[alltoall-{layout}-{workload}]"
    where: dict[str, Any] = {"variant": "alltoall", "layout": layout, "workload": workload}
    more.setdefault("traits", ("float32", "K=2", "moves rows"))
    return Record(node, "test_x", ("EXCH-01",), verdict, runs=int(verdict != "not run"), **where, **more)


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Path]:
    """Write a report and return its folder."""

    def write(name: str, *records: Record, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        head = result.head(replace(FACTS, **changes))
        result.write(folder, result.document(head, tuple(spec.load().values()), records))
        return folder

    return write


def merged(*folders: Path) -> merge.Merged:
    """Return the reports of these folders, put together."""
    return merge.merge([merge.read(folder) for folder in folders], "merge")


class TestShards:
    def test_every_name_is_in_one_shard_and_loads_are_even(self) -> None:
        """The union is the whole, and no shard is heavier than another by more than one name."""
        weights = {f"cell-{i}": 10 + i for i in range(23)}
        divided = shards.divide(weights, 4)
        assert sorted(weights) == sorted(name for names in divided for name in names)
        loads = [sum(weights[name] for name in names) for names in divided]
        assert max(loads) - min(loads) <= max(weights.values())
        assert divided == shards.divide(dict(reversed(weights.items())), 4)
        assert 0 == doctest.testmod(shards).failed

    @pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/0", "a/b", "1/2/3", "-1/2"])
    def test_what_names_no_shard_is_refused(self, text: str) -> None:
        """With the form that is wanted."""
        with pytest.raises(ValueError, match="needs I/N"):
            shards.parse(text)


class TestUnion:
    def test_shards_make_the_whole(self, report: Callable[..., Path]) -> None:
        """Items, cases and seconds add up, and the run passes as one that was never divided."""
        one = report("one", record("ep2", "pass"), shard="1/2")
        two = report("two", record("ep4", "refused"), shard="2/2")
        whole = merged(one, two)
        assert {"ep2", "ep4"} == {each.layout for each in whole.records}
        assert (0, 2, 16.0, None, False) == tuple(
            whole.head[name] for name in ("exit", "cases", "seconds", "shard", "interrupted")
        )
        assert ([], ()) == (whole.head["problems"], whole.notes)

    def test_a_failure_in_one_fails_all(self, report: Callable[..., Path]) -> None:
        """The exit status is that of a run."""
        assert 1 == merged(report("one", record("ep2", "pass")), report("two", record("ep4", "hang"))).head["exit"]

    def test_a_missing_shard_is_told_and_fails(self, report: Callable[..., Path]) -> None:
        """Two of three are not the whole."""
        head = merged(report("a", record("ep2", "pass"), shard="1/3"), report("b", shard="3/3")).head
        assert (["shard 2/3 is missing"], 1) == (head["problems"], head["exit"])

    def test_what_was_judged_twice_is_told(self, report: Callable[..., Path]) -> None:
        """Equal verdicts are one; of different ones the worse stands, and that they differ fails the run."""
        one = report("one", record("ep2", "pass"), record("ep4", "pass"))
        two = report("two", record("ep2", "pass"), record("ep4", "fail"))
        whole = merged(one, two)
        assert ["pass", "fail"] == [each.verdict for each in whole.records]
        assert whole.notes[0].startswith("2 items were checked more than once: ")
        assert ["test_x[alltoall-ep4-even] is pass in one report and fail in " + str(two)] == whole.head["problems"]

    def test_nothing_passed(self, report: Callable[..., Path]) -> None:
        """It is asked of the whole and not of the shards."""
        one, two = report("one", record("ep2", "refused"), shard="1/2"), report("two", shard="2/2")
        assert "no check passed" in merged(one, two).head["problems"][0]


class TestHeld:
    """The whole is held to the floor, to an earlier report and to ep > 1, as a run that was never divided."""

    @pytest.fixture
    def floors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The folder of floors, with one of the toy: two variants on ep2."""
        folder = tmp_path / "floors"
        folder.mkdir()
        of_both = "".join(f'[passes.{variant}]\nEXCH-01 = "2 ep2"\n' for variant in ("alltoall", "allgather"))
        (folder / "toy.toml").write_text(f'versions = {{"toylib" = "2"}}\n{of_both}')
        monkeypatch.setattr(floor_file, "FOLDER", folder)
        return folder

    def cases(self, variant: str, *verdicts: Verdict) -> list[Record]:
        """Return a record of a variant on ep2 for each verdict."""
        found = [record("ep2", verdict, f"w{n}") for n, verdict in enumerate(verdicts)]
        return [replace(each, variant=variant, node=each.node.replace("alltoall", variant)) for each in found]

    def problems(self, *folders: Path, against: Path | None = None) -> list[str]:
        """Return what fails the whole."""
        old = None if against is None else result.read(against)
        problems: list[str] = merge.merge([merge.read(folder) for folder in folders], "merge", old).head["problems"]
        return problems

    def test_a_variant_that_is_gone_is_below_the_floor(self, report: Callable[..., Path], floors: Path) -> None:
        """No shard had it; all that a shard was told of its part is told once."""
        told = "below the floor in 1 places, by 2 passes: EXCH-01, allgather on ep2: not run instead of pass"
        one = report("one", *self.cases("alltoall", "pass", "pass"), shard="1/2", problems=(told,))
        two = report("two", shard="2/2")
        assert [told] == self.problems(one, two)
        kept = report("kept", *self.cases("allgather", "pass", "pass"), shard="2/2")
        assert [] == self.problems(one, kept)

    def test_fewer_cases_are_below_the_floor(self, report: Callable[..., Path], floors: Path) -> None:
        """Of a shard that is missing nothing is known, and only that is told."""
        one = report("one", *self.cases("alltoall", "pass", "not adapted"), shard="1/2")
        two = report("two", *self.cases("allgather", "pass", "pass"), shard="2/2")
        fell = "below the floor in 1 places, by 1 passes: EXCH-01, alltoall on ep2: 1 of 2 pass, 1 not adapted"
        assert [fell] == self.problems(one, two)
        assert ["shard 2/2 is missing"] == self.problems(one)

    def test_a_part_that_was_narrowed_is_not_the_whole(self, report: Callable[..., Path], floors: Path) -> None:
        """It is not known what it left out; a narrowed continuation of a whole run leaves nothing out."""
        narrowed = report("narrowed", *self.cases("alltoall", "pass"), filtered=True)
        assert [] == self.problems(narrowed)
        stop = {"interrupted": True, "stopped": "terminated by SIGTERM", "exit": 143}
        stopped = report("stopped", *self.cases("alltoall", "pass", "not run"), **stop)
        rest = self.cases("alltoall", "pass", "not adapted")[1:]
        assert 1 == len(self.problems(stopped, report("rest", *rest, filtered=True)))

    def test_the_floor_is_of_one_version_device_and_profile(self, report: Callable[..., Path], floors: Path) -> None:
        """A whole that it is not for is held to none; nor is one with a planted bug."""
        others: list[dict[str, Any]] = [{"versions": {"toylib": "3"}}, {"device": "cuda"}, {"plant": "bug"}]
        for other in others:
            assert [] == self.problems(report("-".join(other), *self.cases("alltoall", "pass"), **other))

    def test_it_is_compared_with_an_earlier_report(self, report: Callable[..., Path]) -> None:
        """Of which a variant is gone; what the shards were told of it is told once."""
        old = report("old", *self.cases("alltoall", "pass"), *self.cases("allgather", "pass"))
        one = report("one", *self.cases("alltoall", "pass"), shard="1/2", problems=("worse than old in 7 places: x",))
        two = report("two", shard="2/2")
        worse = f"worse than {old} in 1 places: EXCH-01, allgather on ep2: pass -> not run"
        assert [worse] == self.problems(one, two, against=old)
        assert ["worse than old in 7 places: x"] == self.problems(one, two)

    def test_several_ranks_without_expert_parallelism_fail(self, report: Callable[..., Path]) -> None:
        """Unless the backend has a single rank, or the report is of a suite that did not say."""
        folder = report("alone", record("single", "pass"), shard="1/1")
        (problem,) = self.problems(folder)
        assert problem.startswith("no exchange and no layer was judged on a layout with ep > 1")
        assert [] == self.problems(report("one-rank", record("single", "pass"), single_rank=True))
        head, _, rest = (folder / result.NAME).read_text().partition('"single_rank": false,\n')
        (folder / result.NAME).write_text(head + rest)
        assert [] == self.problems(folder)


class TestStopped:
    def test_the_continuation_completes_a_stopped_run(self, report: Callable[..., Path]) -> None:
        """What one did not come to, the other judged."""
        stop = {"interrupted": True, "stopped": "terminated by SIGTERM", "exit": 143}
        one = report("one", record("ep2", "pass"), record("ep4", "not run"), **stop)
        two = report("two", record("ep4", "pass"), filtered=True)
        assert (0, False, None) == tuple(merged(one, two).head[name] for name in ("exit", "interrupted", "stopped"))
        alone = merged(one).head
        assert (1, True, f"{one}: terminated by SIGTERM") == tuple(
            alone[name] for name in ("exit", "interrupted", "stopped")
        )

    def test_what_nobody_came_to_is_counted(self, report: Callable[..., Path]) -> None:
        """Two of four cases are left, whether one part or both were stopped before them; the merged report says so."""
        stop = {"interrupted": True, "stopped": "terminated by SIGTERM", "exit": 143}
        names = ("a", "b", "c", "d")
        one = report("one", *(record("ep2", "pass" if name == "a" else "not run", name) for name in names), **stop)
        two = report("two", *(record("ep2", "pass" if name == "b" else "not run", name) for name in names), **stop)
        whole = merged(one, two)
        assert [("a", "pass", 1), ("b", "pass", 1), (None, "not run", 2)] == [
            (each.workload, each.verdict, each.cases) for each in whole.records
        ]
        assert (True, 1) == (whole.head["interrupted"], whole.head["exit"])

    def test_a_shard_that_was_stopped_before_it_knew_its_items_is_missing(self, report: Callable[..., Path]) -> None:
        """It has no records, and nobody judged what they would have been."""
        stop = {"interrupted": True, "stopped": "terminated by SIGTERM", "exit": 143}
        one, two = report("one", record("ep2", "pass"), shard="1/2"), report("two", shard="2/2", **stop)
        head = merged(one, two).head
        assert (1, True, f"{two}: terminated by SIGTERM") == tuple(
            head[name] for name in ("exit", "interrupted", "stopped")
        )

    def test_of_a_killed_run_its_lines_are_left(self, report: Callable[..., Path]) -> None:
        """Its result.json was written at the start and says that there is no end; the records are in the journal."""
        folder = report("one", finished=None, exit=None, interrupted=True, stopped=result.UNFINISHED)
        journal = Journal(folder)
        journal.write([record("ep2", "pass")])
        journal.close()
        head = merged(folder).head
        assert (True, 1, 1) == (head["interrupted"], head["exit"], head["cases"])
        assert not merged(folder, report("two", record("ep2", "pass"), record("ep4", "pass"))).head["interrupted"]


class TestWaivers:
    WAIVER = Waiver(
        "T-01", ("EXCH-01",), ("alltoall",), ("ep*",), ("even",), "it drops", "there", "me", date(2030, 1, 1),
        ("toylib>=2",), "test_x[alltoall-ep2-even]", (Failure("WrongOutput", "combine", ("instead of",)),),
    )  # fmt: skip

    def test_a_waiver_used_in_one_shard_is_used(self, report: Callable[..., Path]) -> None:
        """Whether a waiver waives nothing is seen in the whole only."""
        one = report("one", record("ep2", "waived", waiver="T-01"), shard="1/2", waivers=(self.WAIVER,))
        two = report("two", record("ep4", "pass"), shard="2/2", waivers=(self.WAIVER,))
        assert [] == merged(one, two).head["problems"]
        three = report("three", record("ep2", "pass"), waivers=(self.WAIVER,))
        assert merged(three).head["problems"][0].startswith("T-01 is unused")


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"versions": {"toylib": "3"}}, "versions toylib 2 and toylib 3"),
            ({"profile": "full"}, "profile quick and full"),
            ({"backend": "other"}, "backend toy and other"),
            ({"only": ("EXCH-01",)}, r"only \[\] and \['EXCH-01'\]"),
            ({"shard": "1/3"}, "not divided alike: the whole and shard 1/3"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    def test_reports_of_different_runs(self, report: Callable[..., Path], changes: Any, sentence: str) -> None:
        """One sentence says in what they differ."""
        with pytest.raises(merge.Unmergeable, match=sentence):
            merged(report("one", record("ep2", "pass")), report("two", record("ep4", "pass"), **changes))

    def test_reports_of_different_suites(self, report: Callable[..., Path]) -> None:
        """Another version may have judged otherwise."""
        folder = report("two", record("ep2", "pass"))
        path = folder / result.NAME
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"suite": "0.0.1"}))
        with pytest.raises(merge.Unmergeable, match=r"suite .* and 0\.0\.1"):
            merged(report("one", record("ep4", "pass")), folder)

    @pytest.mark.parametrize(("schema", "said"), [(None, "format 1"), (2, "format 2"), (4, "format 4")])
    def test_another_format(self, report: Callable[..., Path], schema: int | None, said: str) -> None:
        """The first had no number. What to do is said, with the version that can read it."""
        folder = report("one", record("ep2", "pass"))
        content = json.loads((folder / result.NAME).read_text("utf-8")) | {"schema": schema, "suite": "0.0.1"}
        if schema is None:
            del content["schema"]
        (folder / result.NAME).write_text(json.dumps(content))
        with pytest.raises(merge.Unmergeable, match=f"of {said}, and this suite .*: run again, .* 0.0.1"):
            merged(folder)

    def test_no_report(self, tmp_path: Path) -> None:
        """A folder without one, and one with something else."""
        with pytest.raises(merge.Unmergeable, match=r"no report in .*result\.json is missing"):
            merged(tmp_path)
        (tmp_path / result.NAME).write_text("[]")
        with pytest.raises(merge.Unmergeable, match="no report of this suite"):
            merged(tmp_path)

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"variants": None}, "variants is None, expected: array"),
            ({"ranks": "four"}, "ranks is 'four', expected: integer"),
            ({"profile": "fast"}, "profile is 'fast', expected: one of quick"),
            ({"shard": "x"}, "shard is 'x', expected: the form"),
            ({"shard": "3/2"}, "I/N with I from 1 to N"),
            ({"started": "soon"}, "Invalid isoformat string: 'soon'"),
            ({"waivers": [{"expires": "soon"}]}, r"waivers\[0\] has no id"),
            ({"records": [{"check": 0}]}, r"records\[0\] has no requirements"),
            ({"records": [{**ENTRY, "verdict": "good"}]}, "verdict is 'good', expected: one of pass"),
            ({"records": [{**ENTRY, "check": 7}]}, "list index out of range"),
            ({"records": [{**ENTRY, "runs": [1, 0]}]}, "1 workloads and 2 values of runs"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
    )
    def test_what_cannot_be_read_is_told(self, report: Callable[..., Path], changes: Any, sentence: str) -> None:
        """A report that was written by hand, by another suite or only in part is refused in a sentence."""
        folder = report("one", record("ep2", "pass"))
        content = json.loads((folder / result.NAME).read_text("utf-8"))
        (folder / result.NAME).write_text(json.dumps(content | changes))
        with pytest.raises(merge.Unmergeable, match=f"one holds no report of this suite: .*{sentence}"):
            merged(folder)
        (name, *_) = changes
        del content[name]
        (folder / result.NAME).write_text(json.dumps(content))
        with pytest.raises(merge.Unmergeable, match=f"one holds no report of this suite: .*{name}"):
            merged(folder)


class TestCommand:
    def test_it_writes_one_report_and_tells_it(self, report: Callable[..., Path], tmp_path: Path) -> None:
        """The status, the file, the matrix and the totals are those of a run."""
        folders = [str(report(name, record(layout, "pass"))) for name, layout in (("one", "ep2"), ("two", "ep4"))]
        out = tmp_path / "out"
        done = CliRunner().invoke(cli.main, ["merge", *folders, "--report", str(out)])
        assert 0 == done.exit_code, done.output
        assert "2 pass" in done.output
        assert f"report: {out / result.NAME}" in done.output
        assert folders == json.loads((out / result.NAME).read_text("utf-8"))["merged"]
        again = CliRunner().invoke(cli.main, ["merge", str(out), "--report", str(tmp_path / "twice")])
        assert (2, True) == (again.exit_code, "was merged already" in again.output)

    def test_a_report_is_not_overwritten_by_its_merger(self, report: Callable[..., Path]) -> None:
        """One sentence and status 2."""
        folder = str(report("one", record("ep2", "pass")))
        done = CliRunner().invoke(cli.main, ["merge", folder, "--report", folder])
        assert (2, True) == (done.exit_code, "is one of the reports" in done.output)
