"""`moe-conformance parity`: what its table has of correct code and of planted bugs, in all its forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from moe_conformance import cli
from moe_conformance.chapters.training.parity import QUANTITIES, ROWS, Compared
from moe_conformance.judging.verdict import Deviation
from moe_conformance.plugin.run import planted
from moe_conformance.report import parity
from self_tests.plugin.plugin_runs import record

EVIL = "<img src=x onerror=alert(1)> | a\nb"


def asked(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Return status and output of the command, on two ranks at most."""
    done = CliRunner().invoke(cli.main, ["parity", "--ranks", "2", "--format", "json", *arguments])
    document = json.loads(done.stdout)
    schema = json.loads(files("moe_conformance.report").joinpath("parity.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema, jsonschema.Draft202012Validator)
    return done.exit_code, document


def cells_of(document: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the cells of a row by quantity."""
    (row,) = (row for row in document["rows"] if row["name"] == name)
    return {cell["quantity"]: cell for cell in row["cells"]}


class TestCommand:
    def test_native_equals_one_device(self) -> None:
        """Every quantity has a number on each layout that fits; of the others the cells have the reason."""
        status, document = asked()
        assert (0, True) == (status, document["held"])
        for name in ("single", "dp", "ep"):
            cells = cells_of(document, name)
            assert list(QUANTITIES) == list(cells)
            assert all(0 < cell["ratio"] <= 1 and cell["at"] for cell in cells.values())
        assert {"tp2-ep2-edp2 is a layout of 4 ranks, and --ranks is 2"} == {
            cell["why"] for cell in cells_of(document, "tp + ep").values()
        }
        (stages,) = {cell["why"] for cell in cells_of(document, "pp + ep").values()}
        assert stages.startswith("no such layout in the suite")

    def test_a_file(self, tmp_path: Path) -> None:
        """Nothing else is in it, whatever a library prints."""
        path = tmp_path / "parity.md"
        done = CliRunner().invoke(cli.main, ["parity", "--ranks", "1", "--format", "markdown", "--output", str(path)])
        assert (0, "") == (done.exit_code, done.stdout)
        assert path.read_text("utf-8").startswith("## native (torch ")

    def test_a_factor_is_shown_with_the_parameter(self) -> None:
        """A bug of ep = 2 shows there alone, and not in what the step begins with; what follows is not compared."""
        status, document = asked("--backend", planted("expert-rate-times-ep"))
        cells = cells_of(document, "ep")
        assert (1, False) == (status, document["held"])
        assert cells["parameters after 1 step"]["ratio"] > 1
        assert "2.000 x the expected value: dp or ep or microbatches" == cells["parameters after 1 step"]["factor"]
        assert " of expert " in cells["parameters after 1 step"]["at"]
        assert all(cells[each]["ratio"] <= 1 for each in ("gradients", "moments after 1 step"))
        assert {"why", "quantity"} == cells["parameters after 4 steps"].keys()
        assert all(cell["ratio"] <= 1 for cell in cells_of(document, "single").values())
        failures = document["rows"][2]["failures"]
        assert "the change of these expert parameters is 2.000 x the expected value" in failures[-1]

    def test_gradients_show_themselves(self) -> None:
        """Those of experts, divided by ep."""
        _, document = asked("--backend", planted("experts-divided-by-ep"))
        gradients = cells_of(document, "ep")["gradients"]
        assert (True, "0.500 x the expected value: 1/dp or 1/ep or 1/microbatches") == (
            gradients["ratio"] > 1,
            gradients["factor"],
        )

    def test_a_backend_without_a_trainer(self) -> None:
        """Nothing is compared, which is no success."""
        status, document = asked("--backend", "self_tests.correct_backends.two_hops:TwoHop")
        assert (1, False) == (status, document["held"])
        assert "not adapted: this backend offers no trainer" == cells_of(document, "ep")["loss"]["why"]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--format", "yaml"], "'yaml' is not one of"),
            (["--ranks", "many"], "--ranks needs a number, not 'many'"),
            (["--ranks", "0"], "no layout fits 0 ranks"),
            (["--backend", "nobody"], "nobody"),
            (["--library", "/nowhere"], "--library /nowhere is no folder"),
            (["--only", "TRAIN-01"], "No such option"),
            (["--output", "/"], "is a directory"),
        ],
    )
    def test_what_cannot_run(self, arguments: list[str], said: str) -> None:
        """One sentence and status 2."""
        done = CliRunner().invoke(cli.main, ["parity", *arguments])
        assert 2 == done.exit_code
        assert said in done.output


def made() -> parity.Table:
    """A table with a cell of every kind."""
    row = Compared.nothing(EVIL)
    row.cells["loss"] = Deviation("loss", 2.5, EVIL, "2.000 x the expected value: ep")
    row.cells["norm"] = Deviation("norm", 1e300, "step 0")
    row.ran.append("train-adamw in default")
    row.failures.append(f"finish: {EVIL}")
    return parity.Table("toy", {"torch": "2"}, 4, "moe-conformance parity", [(ROWS[0], row)])


class TestWords:
    def test_text(self) -> None:
        """Numbers in the table; below it where the largest is, reasons, failures, and the verdict."""
        shown = parity.text(made(), width=80, encoding="utf-8").splitlines()
        assert any(line.split()[:4] == ["single", "2.5", "inf", "-"] for line in shown)
        assert "  single: norm inf, step 0 (train-adamw in default)" in shown
        assert "NOT equal to one device: 2 of 7 cells compared" == shown[-1]

    def test_no_word_leaves_its_cell_in_markdown(self) -> None:
        """Nor becomes markup."""
        shown = parity.markdown(made())
        (line,) = (line for line in shown.splitlines() if line.startswith("| single"))
        assert 1 + len(QUANTITIES) == line.replace("\\|", "").count("|") - 1
        assert "<img" not in shown
        assert "all of what is wrong: 2.000 x the expected value: ep" in line

    def test_nothing_compared(self) -> None:
        """Is not equal to anything."""
        table = parity.Table("toy", {}, 4, "", [(ROWS[0], Compared.nothing("no"))])
        assert (False, "nothing was compared") == (table.held, parity.verdict(table))


class TestOfRecords:
    def test_the_largest_of_a_layout_is_shown(self) -> None:
        """Of all checks and scripts; a layout without any has the reason of its records."""
        small, large = ({"loss": Deviation("loss", size, "step 1").plain()} for size in (0.25, 0.5))
        of_no_row = {"loss": Deviation("loss", 0.75).plain()}
        records = [
            replace(record("TRAIN-04", "pass", deviations=small), workload="train-adamw"),
            replace(record("TRAIN-04", "pass", deviations=large), workload="train-sgd"),
            replace(record("TRAIN-04", "pass", deviations=of_no_row), workload="train-not-finite"),
            replace(record("TRAIN-04", "refused", "single", "refused by the library: no"), workload="train-adamw"),
        ]
        rows = dict(parity.of_records(records))
        assert ["0.5, step 1", "not judged in this run"] == rows["ep"][:2]
        assert "refused by the library: no" == rows["single"][0]
        assert "not judged in this run" == rows["dp"][0]

    def test_a_run_without_training(self) -> None:
        """Has no table."""
        assert [] == parity.of_records([record("EXCH-01", "pass")])


class TestPage:
    def test_tables_in_the_documentation_are_of_these_layouts_and_quantities(self) -> None:
        """A row or a column that is added is measured for the page too."""
        page = (Path(__file__).parents[2] / "docs" / "parity.md").read_text("utf-8")
        tables = [[line for line in part.splitlines() if line.startswith("|")] for part in page.split("\n## ")[1:]]
        found = [[line.strip("| ").split(" | ") for line in table] for table in tables]
        assert 1 < len(found)
        for head, _, *rows in found:
            assert ["layout", *QUANTITIES] == head
            assert [row.name for row in ROWS] == [cells[0] for cells in rows]
