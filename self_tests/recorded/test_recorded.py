"""Outcomes of real libraries are judged as they were when they were recorded: no library is needed, and nothing runs.

Each folder LIBRARY/VERSION is found by itself. Where a verdict differs by intention, look at the difference and run
`moe-conformance rejudge self_tests/recorded --accept`.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from moe_conformance.backends import registry
from moe_conformance.recorded import again, files
from moe_conformance.workloads.plan import Plan

FOLDER = Path(__file__).parent
PATHS = sorted(FOLDER.glob("*/*/*.json"))
VERSIONS = sorted({path.parent for path in PATHS})
MOST_BYTES = 2 << 20


@cache
def plan(backend: str) -> Plan:
    """Return the cases of a backend; its library is not imported for it."""
    assert backend in registry.names()
    return Plan(registry.load(backend), "cpu", "quick")


class TestRecordedOutcomes:
    @pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(FOLDER).with_suffix("")))
    def test_they_are_judged_as_they_were(self, path: Path) -> None:
        """Verdict, kind, stage, and the numbers of elements and pairs that were compared."""
        recorded = files.read(path)
        assert [] == list(again.differences(recorded, again.judged_again(recorded, plan(recorded.backend))))

    @pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: str(path.relative_to(FOLDER)))
    def test_they_pass_and_fail(self, folder: Path) -> None:
        """In each version of a library, of the checks of several chapters; the files lie where their contents say."""
        recorded = [files.read(path) for path in sorted(folder.glob("*.json"))]
        verdicts = Counter(verdict.verdict for each in recorded for verdict in each.verdicts.values())
        assert verdicts["pass"] > 10
        assert verdicts["fail"] > 2
        assert 4 < len({check.partition(":")[0] for each in recorded for check in each.verdicts})
        assert {(folder.parent.name, folder.name)} == {(e.backend, again.library_of(e.versions)[1]) for e in recorded}
        assert {path.stem for path in folder.iterdir()} == {each.id for each in recorded}

    def test_they_are_small(self) -> None:
        """All of them together."""
        assert sum(path.stat().st_size for path in FOLDER.glob("*/*/*")) < MOST_BYTES

    def test_they_name_no_folder_of_a_machine(self) -> None:
        """Of where they were recorded."""
        words = ("site-packages", "/home/", "/tmp/", "/root/")
        assert [] == [path.name for path in PATHS if any(word in path.read_text("utf-8") for word in words)]
