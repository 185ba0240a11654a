"""The spec is well formed, and no check cites what it does not have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest

from moe_conformance import spec
from moe_conformance.spec import BadSpec, places, requirement
from moe_conformance.spec.checks import by_requirement, checks
from moe_conformance.workloads.records.runs import ExchangeStep
from tools import spec_pages

ROOT = Path(__file__).parents[2]

ENTRY = {
    "id": "EXCH-01",
    "level": "MUST",
    "profile": "quick",
    "sentence": "It MUST hold.",
    "formula": "f",
    "degenerate": "none",
    "source": "s",
    "since": "0.1.0",
}


class TestLoad:
    def test_ids_of_a_prefix_count_up(self) -> None:
        """Without gaps, whichever chapters they are in; within a chapter those of a prefix stand in order."""
        by_prefix: dict[str, list[str]] = {}
        for each in spec.load().values():
            by_prefix.setdefault(each.id.split("-")[0], []).append(each.id)
        for prefix, ids in by_prefix.items():
            assert [f"{prefix}-{n:02}" for n in range(1, len(ids) + 1)] == sorted(ids)

    def test_since_is_a_version_of_the_suite(self) -> None:
        """One that CHANGELOG.md describes, or the one that the project has now."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        released = re.findall(r"^## (\d+\.\d+\.\d+) ", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
        assert released
        assert set() == {each.since for each in spec.load().values()} - {project["version"], *released}

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"id": "EXCH-1"}, "PREFIX-nn"),
            ({"level": "MAY"}, "level is MUST or SHOULD"),
            ({"level": "SHOULD"}, "the sentence says it"),
            ({"profile": "fast"}, "the profile is one of quick, full, virtual, not 'fast'"),
            ({"sentnce": "x"}, "unknown: sentnce"),
        ],
    )
    def test_a_malformed_entry_is_told(self, change: dict[str, str], words: str) -> None:
        """A wrong id, level or field name is an error that names chapter and field."""
        with pytest.raises(BadSpec, match=words):
            spec._parse("exchange", {**ENTRY, **change})

    def test_a_missing_field_is_told(self) -> None:
        """No field may be left out."""
        with pytest.raises(BadSpec, match="source"):
            spec._parse("exchange", {key: value for key, value in ENTRY.items() if key != "source"})


class TestRows:
    TABLE: ClassVar = {"sentence": "It MUST be refused {conflict}.", "source": "s", "row": []}

    def test_a_row_has_the_words_of_its_table(self) -> None:
        """What the table names is the row's, and a field of the row's own takes the place of the table's."""
        row = {"id": "RULE-99", "conflict": "with {}", "source": "t"}
        expected = {"id": "RULE-99", "sentence": "It MUST be refused with {}.", "source": "t"}
        assert expected == spec._row(self.TABLE, row)

    def test_a_row_that_lacks_a_word_is_told(self) -> None:
        """By its id and the word."""
        with pytest.raises(BadSpec, match="RULE-99: its table asks for 'conflict'"):
            spec._row(self.TABLE, {"id": "RULE-99"})


class TestChecked:
    def test_it_holds_exactly_what_checks_cite(self) -> None:
        """What is read from the source text of the checks is what their marks say once they are imported."""
        assert places.checked() == set(by_requirement())

    def test_a_reason_stands_where_there_is_no_check(self) -> None:
        """A requirement that has a check does not say why it has none."""
        assert [] == [each.id for each in spec.load().values() if each.without_check and each.id in places.checked()]


class TestPages:
    def test_every_requirement_has_an_entry(self) -> None:
        """On the page of its chapter, once, with its sentence; the index counts it."""
        pages = spec_pages.pages()
        by_chapter: dict[str, list[str]] = {}
        for each in spec.load().values():
            by_chapter.setdefault(each.chapter, []).append(each.id)
            assert 1 == pages[f"{each.chapter}.md"].count(f"\n## {each.id}\n\n**{each.sentence}**\n")
        assert {f"{name}.md" for name in by_chapter} | {"README.md", "other_suites.md", "claims.md"} == set(pages)
        for name, ids in by_chapter.items():
            assert re.search(rf"^\| \[{name}\]\({name}\.md\) \| [A-Z, ]+ \| {len(ids)} \|", pages["README.md"], re.M)

    def test_none_is_stored(self) -> None:
        """The site is built with them; in the repository are only the head of the index and the tables as data."""
        stored = {path.name for path in spec_pages.FOLDER.iterdir()}
        assert {spec_pages.INDEX, spec_pages.OTHERS, spec_pages.CLAIMS} == stored
        assert not (spec_pages.FOLDER.parent / "planted_bugs.md").exists()

    def test_every_claim_is_held_or_has_a_reason(self) -> None:
        """Claims have names of their own and a verdict; each has requirements of the spec, or a reason for none."""
        rows = spec_pages.read_claims()
        assert len(rows) == len({row["name"] for row in rows})
        verdicts = {row["verdict"].partition(":")[0].partition(",")[0] for row in rows}
        assert {"definition", "right", "wrong", "in part"} == verdicts
        assert [] == [row["name"] for row in rows if bool(row["requirements"]) == bool(row.get("reason"))]
        assert set() == {each for row in rows for each in row["requirements"]} - set(spec.load())

    def test_every_behaviour_of_another_suite_is_covered_or_has_a_reason(self) -> None:
        """Rows count up without gaps; each names requirements of the spec, or says why there is none."""
        rows = spec_pages.read_others()
        assert list(range(1, len(rows) + 1)) == [row["number"] for row in rows]
        assert [] == [row["number"] for row in rows if bool(row["requirements"]) == bool(row.get("reason"))]
        assert set() == {each for row in rows for each in row["requirements"]} - set(spec.load())

    def test_every_behaviour_says_what_decides_it_or_why_nothing_does(self) -> None:
        """No row is blank, and every requirement of a row stands on the side where it belongs."""
        functions = {check.function.__name__ for check in checks()}
        for row in spec_pages.read_others():
            decided, waiting = spec_pages._decided(row, spec_pages._checks())
            assert decided or waiting, row["number"]
            for each in row["requirements"]:
                assert (each in decided) is (each in by_requirement()), (row["number"], each)
                assert (each in waiting) is (each not in by_requirement()), (row["number"], each)
            assert {name.strip("`,;") for name in decided.split() if "`" in name} <= functions, row["number"]

    def test_a_requirement_without_a_check_gives_its_reason(self) -> None:
        """What decides one requirement of a row does not speak for the other, and reasons are told once."""
        row = {"number": 1, "words": "w", "requirements": ["EXCH-01", "GRAPH-01", "GRAPH-02", "EXCH-24"]}
        decided, waiting = spec_pages._decided(row, {"EXCH-01": ["test_a", "test_b", "test_a"], "EXCH-24": ["test_c"]})
        assert "EXCH-01 `test_a`, `test_b`; EXCH-24 `test_c`" == decided
        assert "GRAPH-01, GRAPH-02: no check yet: needs a GPU to capture graphs on" == waiting


class TestRequirement:
    def test_unknown_ids_are_refused(self) -> None:
        """A check cannot cite an id that the spec does not have."""
        with pytest.raises(BadSpec, match="no requirement EXCH-99"):
            requirement("EXCH-01", "EXCH-99", run=ExchangeStep())
