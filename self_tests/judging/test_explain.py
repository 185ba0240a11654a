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
    def test_names_attributes_and_constructors_are_followed(self, tmp_path: Path) -> None:
        """Through imports under other names, modules that pass a name on, and methods of classes that are named.

        What stands in an annotation alone is not called: but its methods are, where they are named.
        """
        package = tmp_path / "some"
        package.mkdir()
        (package / "__init__.py").write_text("from some.deep import low as passed\n")
        (package / "deep.py").write_text("def low(): ...\ndef unused(): ...\nclass Hint: ...\n")
        (package / "kinds.py").write_text(
            "from . import deep\nclass Kind:\n    def __init__(self): deep.low()\n    def method(self): return TABLE\n"
            "TABLE = {'a': deep.unused}\n"
        )
        (package / "top.py").write_text(
            "from some import passed as other\nfrom some.kinds import Kind\nfrom some.deep import Hint\n"
            "def by_name(): other()\ndef by_class(): Kind()\ndef by_method(x: Kind): x.method()\n"
            "def by_another(x: Hint): x.method()\n"
        )
        graph = SourceGraph(tmp_path, ("some",))

        def reached(name: str) -> set[str]:
            return {each.id for each in graph.reached(f"some.top:{name}")} - {f"some.top:{name}"}

        assert {"some.deep:low"} == reached("by_name")
        assert {"some.kinds:Kind", "some.kinds:Kind.__init__", "some.deep:low"} == reached("by_class")
        assert {"some.kinds:Kind.method", "some.kinds:TABLE", "some.deep:unused"} == reached("by_method")
        assert set() == reached("by_another")
