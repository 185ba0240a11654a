"""The law is well formed, and no check cites what it does not have."""

from __future__ import annotations

import pytest

from moe_conformance import spec
from moe_conformance.spec import BadSpec, requirement

ENTRY = {
    "id": "EXCH-01",
    "level": "MUST",
    "sentence": "It MUST hold.",
    "formula": "f",
    "degenerate": "none",
    "source": "s",
    "since": "0.1",
}


class TestLoad:
    def test_every_chapter_has_one_prefix(self) -> None:
        """Ids of a chapter share a prefix, and count up without gaps."""
        by_chapter: dict[str, list[str]] = {}
        for each in spec.load().values():
            by_chapter.setdefault(each.chapter, []).append(each.id)
        for ids in by_chapter.values():
            prefix = ids[0].split("-")[0]
            assert [f"{prefix}-{n:02}" for n in range(1, len(ids) + 1)] == ids

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"id": "EXCH-1"}, "PREFIX-nn"),
            ({"level": "MAY"}, "level is MUST or SHOULD"),
            ({"level": "SHOULD"}, "the sentence says it"),
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


class TestRequirement:
    def test_unknown_ids_are_refused(self) -> None:
        """A check cannot cite an id that the law does not have."""
        with pytest.raises(BadSpec, match="no requirement EXCH-99"):
            requirement("EXCH-01", "EXCH-99", kind="probe")
