"""The tables of a report: exchanges on layouts, and what travelled against the least that has to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moe_conformance import cli, spec
from moe_conformance.backends.native import Native
from moe_conformance.contract.topology import Layout
from moe_conformance.report import exchange_table, result, travelled
from moe_conformance.report.records import Record, Verdict
from moe_conformance.spec.checks import by_requirement
from moe_conformance.workloads import virtual
from moe_conformance.workloads.plan import Case, Cell, Plan
from moe_conformance.workloads.recipes import corpus
from moe_conformance.workloads.records.features import IN_FLIGHT, ZERO_TOKENS, cell_limits, traits
from moe_conformance.workloads.selection.profiles import full_layouts, quick_layouts

START = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
FACTS = result.Facts(
    "toy", {"toylib": "2"}, "cpu", 4, "quick", "", "moe-conformance run", "moe-conformance run", START, START, 0,
    interrupted=False, stopped="", variants=("a", "b"),
)  # fmt: skip


def record(requirement: str, verdict: Verdict = "pass", variant: str = "a", layout: str = "ep2", **more: Any) -> Record:
    """Return how a check ended on one workload."""
    node = f"test_x.py::test_{requirement}[{variant}-{layout}-{more.get('workload', 'even')}]"
    return Record(node, "test_x", (requirement,), verdict, variant=variant, layout=layout, **more)


def rows(*records: Record) -> dict[tuple[str, str], list[str]]:
    """The cells of the table, by variant and layout."""
    return cells_of(page(FACTS, *records))


def page(facts: result.Facts, *records: Record) -> str:
    """The page of one run."""
    return exchange_table.page("table", [exchange_table.Section(result.head(facts), records, ["moe-conformance run"])])


def cells_of(page: str) -> dict[tuple[str, str], list[str]]:
    """The cells of the only table of a page."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")][2:]
    return {(variant, layout): cells for variant, layout, *cells in lines}


def planned(plan: Plan) -> Iterator[Record]:
    """A record for every cell and column of the table of which the plan has an item."""
    by_cell: dict[Cell, list[Case]] = {}
    for case in plan.cases:
        by_cell.setdefault(case.cell, []).append(case)
    for cell, cases in by_cell.items():
        verdict: Verdict = "refused" if cell_limits(cell.limits, cell.layout) else "pass"
        for column in exchange_table.COLUMNS:
            chapters = [some for name, some in by_requirement().items() if name.partition("-")[0] in column.chapters]
            own = [check for some in chapters for check in some]
            has = [case for case in cases if not column.trait or column.trait in traits(case.workload)]
            if any(check.reads(case.workload) for case in has for check in own):
                more = (column.trait,) if column.trait else ()
                requirement = f"{column.chapters[0]}-01"
                yield record(requirement, verdict, cell.variant, cell.layout.name, traits=more, workload=column.title)


class TestExchangeTable:
    def test_no_cell_is_blank(self) -> None:
        """Every variant of the backend stands there on every layout of the profile; what was not judged says so."""
        table = rows(record("EXCH-01"))
        assert {(variant, layout.name) for variant in "ab" for layout in quick_layouts()} == set(table)
        assert ["1 pass", *["not run"] * 4] == table["a", "ep2"]
        assert ["not run"] * 5 == table["b", "tp2-ep2-edp2"]

    @pytest.mark.parametrize(
        ("requirement", "has", "columns"),
        [
            ("EXPT-01", (), [0]),
            ("GRAD-02", (), [1]),
            ("PACK-03", (IN_FLIGHT,), [2]),
            ("EXCH-05", (ZERO_TOKENS,), [0, 3]),
            ("GRAD-01", (ZERO_TOKENS, IN_FLIGHT), [1, 3, 4]),
            ("COST-03", (ZERO_TOKENS,), []),
        ],
    )
    def test_an_item_counts_where_it_belongs(self, requirement: str, has: tuple[str, ...], columns: list[int]) -> None:
        """By the chapter that its check cites, and by the traits of its workload."""
        cells = rows(record(requirement, traits=has))["a", "ep2"]
        assert columns == [i for i, cell in enumerate(cells) if cell == "1 pass"]

    def test_every_verdict_is_counted(self) -> None:
        """Failures first; a pass does not hide a refusal."""
        verdicts: tuple[Verdict, ...] = ("pass", "refused", "fail", "pass", "not adapted", "limit")
        given = [record("EXCH-01", verdict, workload=f"w{i}") for i, verdict in enumerate(verdicts)]
        assert "1 fail, 2 pass, 1 refused, 1 not adapted, 1 limit" == rows(*given)["a", "ep2"][0]

    def test_a_layout_that_is_refused_is_refused_throughout(self) -> None:
        """One workload of each kind is asked; what else was refused beside something that passed is not known."""
        assert ["1 refused", *["refused"] * 4] == rows(record("EXCH-01", "refused"))["a", "ep2"]
        given = record("EXCH-01", "refused"), record("EXCH-02", "pass")
        assert ["1 pass, 1 refused", *["not run"] * 4] == rows(*given)["a", "ep2"]

    def test_a_full_plan_leaves_no_cell_unsaid(self) -> None:
        """Every exchange of native has items on every layout, in every column, or is refused there."""
        plan = Plan(Native(), "cpu", "full", 8)
        found = cells_of(page(replace(FACTS, profile="full", ranks=8, variants=Native.variants), *planned(plan)))
        whole = [cell for cell in plan.cells if cell.layout in full_layouts()]
        assert len(found) == len(whole) == len(Native.variants) * len(full_layouts())
        assert {} == {cell: said for cell, said in found.items() if exchange_table.NOT_RUN in said}
        spread = {layout.name for layout in full_layouts() if layout.ep * layout.etp > 1}
        refused = {cell for cell, said in found.items() if "refused" in said[0]}
        assert {("local", layout) for layout in spread} == refused
        assert all("refused" in each for layout in spread for each in found["local", layout])

    def test_many_ranks_have_a_section_of_their_own(self) -> None:
        """Of the layouts that the number of ranks allows; a variant that others stand for says so."""
        facts = replace(FACTS, profile="virtual", ranks=512)
        found = cells_of(page(facts, record("EXCH-01", layout="ep256")))
        assert "1 pass" == found["a", "ep256"][0]
        assert [exchange_table.SPARED] * 5 == found["b", "ep512"]
        assert {layout.name for layout in virtual.layouts()} == {layout for _, layout in found}
        fewer = cells_of(page(replace(facts, ranks=64)))
        assert ("a", "ep64") in fewer
        assert ("a", "ep256") not in fewer

    def test_a_refusal_is_told_with_its_sentence(self) -> None:
        """Once, whatever its numbers, with the number of items and where they are."""
        given = [
            record("EXCH-01", "refused", layout=layout, message=f"{layout}: {ranks} ranks are too many")
            for layout, ranks in (("ep2", 2), ("ep4", 4), ("ep8", 8))
        ]
        text = page(FACTS, *given, record("PACK-01", "not adapted", message="no padding"), record("COST-01", "refused"))
        told = [line for line in text.splitlines() if line.startswith("- a")]
        one, other = "ep2: 2 ranks are too many", "no padding"
        assert [f"- a, 3 items on ep2, ep4, ep8: {one}", f"- a, 1 items on ep2: {other}"] == told

    def test_the_command_makes_it_of_reports(self, tmp_path: Path) -> None:
        """Of several parts too; it names the commands of the runs and its own."""
        for name, layout in (("one", "ep2"), ("two", "ep4")):
            (tmp_path / name).mkdir()
            head = result.head(replace(FACTS, command=f"moe-conformance run {name}"))
            requirements = tuple(spec.load().values())
            result.write(tmp_path / name, result.document(head, requirements, [record("GRAD-01", layout=layout)]))
        folders = [str(tmp_path / name) for name in ("one", "two")]
        told = CliRunner().invoke(cli.main, ["table", *folders])
        assert 0 == told.exit_code, told.output
        assert "| a | ep4 | not run | 1 pass | not run | not run | not run |" in told.output.splitlines()
        assert "- `moe-conformance run two`" in told.output
        done = CliRunner().invoke(cli.main, ["table", *folders, "--output", str(tmp_path / "page.md")])
        assert (0, "") == (done.exit_code, done.output)
        assert told.output == (tmp_path / "page.md").read_text(encoding="utf-8")
        none = CliRunner().invoke(cli.main, ["table", str(tmp_path)])
        assert (2, True) == (none.exit_code, "there is no report" in none.output)
        nowhere = CliRunner().invoke(cli.main, ["table", *folders, "--output", str(tmp_path / "no" / "page.md")])
        assert (2, True) == (nowhere.exit_code, "the table cannot be written" in nowhere.output)

    def test_a_page_is_of_one_backend(self, tmp_path: Path) -> None:
        """Other profiles may stand beside, other backends may not."""
        others: dict[str, dict[str, Any]] = {"two": {"profile": "full"}, "three": {"profile": "full", "backend": "b"}}
        for name, changes in ({"one": {}, **others}).items():
            (tmp_path / name).mkdir()
            head = result.head(replace(FACTS, **changes))
            result.write(tmp_path / name, result.document(head, tuple(spec.load().values()), [record("GRAD-01")]))
        one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
        assert 0 == CliRunner().invoke(cli.main, ["table", one, two]).exit_code
        other = CliRunner().invoke(cli.main, ["table", one, three])
        assert (2, True) == (other.exit_code, "are not of one backend: backend toy and b" in other.output)

    def test_what_is_missing_is_told(self) -> None:
        """A table of some shards, or of a run that was stopped, says so above its cells."""
        head = result.head(FACTS) | {"problems": ["shard 2/2 is missing"], "stopped": "killed"}
        text = exchange_table.page("table", [exchange_table.Section(head, [record("EXCH-01")], ["run"])])
        assert "or are incomplete: shard 2/2 is missing; killed." in text
        assert "are not the whole" not in page(FACTS, record("EXCH-01"))


class TestTraits:
    def test_they_are_those_of_the_workload(self) -> None:
        """Ranks without tokens in any microbatch, and microbatches open at once, whole or in halves."""
        found = {workload.name: traits(workload) for workload in corpus("any", Layout(2, ep=2), "quick")}
        assert () == found["uneven"]
        assert (ZERO_TOKENS,) == found["rank-without-tokens"] == found["by-turns-uneven"]
        assert (IN_FLIGHT,) == found["in-flight-even"] == found["halves-in-flight-even"]


def moved(workload: str, rows_moved: float, least: float, variant: str = "a", layout: str = "ep2") -> Record:
    """Return the record of a workload in which rows travelled."""
    figures = {"rows": rows_moved, "least_rows": least, "bytes": 40 * rows_moved, "least_bytes": 32 * least, "calls": 3}
    return record("COST-03", variant=variant, layout=layout, workload=workload, travelled=figures)


class TestTravelled:
    def test_the_worst_workload_stands_for_its_cell(self) -> None:
        """By the ratio of rows, not by their number; where nothing had to travel there is no ratio."""
        found = travelled.worst([moved("x", 30, 20), moved("y", 4, 2), moved("z", 5, 0), record("EXCH-01")])
        assert [("y", 2.0)] == [(each.workload, each.ratio) for each in found]

    def test_a_line_for_each_layout(self) -> None:
        """Rows and bytes over the least possible, and calls; a cell without figures says that it was not run."""
        records = [moved("x", 3, 2), moved("x", 2, 2, "b", "ep4"), moved("x", 2, 2, "a", "ep4")]
        table = travelled.table(["ep4", "ep2"], records, width=120, encoding="ascii")
        lines = [[cell.strip() for cell in line.strip(" |").split("|")] for line in table.splitlines() if "ep" in line]
        assert [["ep4", "1.00, 1.25; 3", "1.00, 1.25; 3"], ["ep2", "1.50, 1.88; 3", "not run"]] == lines
        assert "" == travelled.table(["ep2"], [record("EXCH-01")], width=120, encoding="ascii")

    def test_the_report_has_it(self) -> None:
        """With the ratio, as plain data."""
        content = result.document(result.head(FACTS), (), [moved("x", 3, 2)])
        (told,) = json.loads(json.dumps(content))["travelled"]
        assert ("a", "ep2", "x", 1.5) == (told["variant"], told["layout"], told["workload"], told["ratio"])
