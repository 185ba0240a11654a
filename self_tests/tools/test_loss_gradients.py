"""The table of losses on layouts shows factors as they are, and says why a cell has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import loss_gradients
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine

LAYOUTS = (Layout(1), Layout(2))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for all tables."""
    with Engine() as engine:
        yield engine


class TestMultiple:
    def test_a_multiple_is_told_from_another_gradient(self) -> None:
        """Half of it is 0.5; what points elsewhere is none."""
        expected = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
        assert 0.5 == loss_gradients.multiple(0.5 * expected, expected)
        assert loss_gradients.multiple(expected.flip(0), expected) is None


class TestTable:
    def test_native_does_not_depend_on_the_layout(self, engine: Engine) -> None:
        """Every cell is 1.000."""
        table = loss_gradients.measure(engine, "native", "alltoall", LAYOUTS)
        assert {loss: ["1.000", "1.000"] for loss in loss_gradients.LOSSES} == table.rows
        assert [] == table.reasons

    def test_sums_over_ranks_and_microbatches_are_shown(self, engine: Engine) -> None:
        """Of a backend that sums, each step has its own factor: microbatches times data parallel groups."""
        backend = "self_tests.correct_backends.unusual_losses:Summed"
        table = loss_gradients.measure(engine, backend, "alltoall", LAYOUTS)
        assert ["1.000, 2.000, 4.000", "2.000, 4.000, 8.000"] == table.rows["switch"]

    def test_a_cell_without_a_number_says_why(self, engine: Engine) -> None:
        """Torchtitan has no loss."""
        pytest.importorskip("torchtitan")
        table = loss_gradients.measure(engine, "torchtitan", "alltoall", LAYOUTS)
        assert {("no such loss [1]", "no such loss [1]")} == {tuple(cells) for cells in table.rows.values()}
        assert [
            "torchtitan 0.3 has no loss of routers: their load is balanced by an expert bias alone"
        ] == table.reasons


class TestPage:
    @pytest.mark.parametrize("backend", loss_gradients.BACKENDS)
    def test_it_has_a_table_of_every_backend(self, backend: str) -> None:
        """With a row for each loss, a cell for each layout, and a sentence for each mark."""
        page = loss_gradients.DOCUMENT.read_text(encoding="utf-8")
        text = page.split(f"<!-- {backend}: written by benchmarks.loss_gradients -->")[1].split(
            f"<!-- end of {backend}"
        )[0]
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
        assert list(loss_gradients.LOSSES) == [row[0].split(" (")[0] for row in rows]
        assert {len(loss_gradients.LAYOUTS)} == {len(row[2:]) for row in rows}
        marks = {cell[cell.index("[") + 1 : -1] for row in rows for cell in row[2:] if "[" in cell}
        assert {line.split(". ")[0] for line in text.splitlines() if line[:1].isdigit()} == marks
