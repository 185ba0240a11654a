"""`moe-conformance explain`, and the index of places that it prints."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from click.testing import CliRunner

from moe_conformance import cli, spec
from moe_conformance.spec.places import Places, decided
from moe_conformance.spec.source_graph import SourceGraph


@cache
def places() -> Places:
    """Return the places of this checkout."""
    return Places()


class TestExplain:
    def test_an_id_leads_to_its_files(self) -> None:
        """The sentence, the checks, the oracle, native's lines and the planted bugs are printed with their files."""
        done = CliRunner().invoke(cli.main, ["explain", "DROP-01"])
        assert 0 == done.exit_code
        for part in (spec.load()["DROP-01"].sentence, "checks:", "test_capacity.py:", "capacities", "planted bugs:"):
            assert part in done.output

    def test_an_unknown_id_is_refused(self) -> None:
        """One sentence, and status 2."""
        done = CliRunner().invoke(cli.main, ["explain", "EXCH-99"])
        assert 2 == done.exit_code
        assert "no requirement EXCH-99" in done.output


class TestDecided:
    def test_ids_stand_before_the_source(self) -> None:
        """Ids that a source happens to name are not decided."""
        assert ("DROP-01", "DROP-02") == decided("Decides: DROP-01, DROP-02. Source: see DROP-03.")

    def test_a_docstring_without_ids(self) -> None:
        """Nothing is decided."""
        assert () == decided("Returns DROP-01.")


class TestSourceGraph:
    def test_definitions_and_methods_have_ids(self, tmp_path: Path) -> None:
        """By module and name, those of a class with its name; what is imported or defined inside is none."""
        package = tmp_path / "some"
        package.mkdir()
        (package / "__init__.py").write_text("from some.deep import low\nTABLE = (1, 2)\n")
        (package / "deep.py").write_text(
            'class Kind:\n    """One."""\n    def method(self): ...\ndef low():\n    def inner(): ...\n'
        )
        found = SourceGraph(tmp_path, ("some",)).symbols
        assert ["some:TABLE", "some.deep:Kind", "some.deep:Kind.method", "some.deep:low"] == list(found)
        assert ["", "One.", "", ""] == [symbol.docstring for symbol in found.values()]
