"""Files that others wrote: whatever is in them, a command that reads them ends with one sentence and status 2."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_conformance import cli, reading, spec, waiving
from moe_conformance.contract.topology import Layout
from moe_conformance.report import floor_file, journal, result
from moe_conformance.workloads.drawn.example import to_json
from moe_conformance.workloads.drawn.reading_example import BadExample, load
from moe_conformance.workloads.recipes import corpus
from self_tests.plugin.plugin_runs import record
from self_tests.plugin.test_waivers import GOOD, NAMES, TODAY

Read = TypeVar("Read")

ODD: list[Any] = [
    None, True, -1, 0, 10**19, 10**30, 1e308, "", "x", "\0", "é", [], {}, [[]], [None], {"": None}, {"x": []},
]  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000
FUZZED = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def document() -> dict[str, Any]:
    """Return the report of a small run."""
    facts = result.Facts(
        backend="native",
        versions={"torch": "2.13.0"},
        device="cpu",
        ranks=2,
        profile="quick",
        plant="",
        command="moe-conformance run",
        again="moe-conformance run --backend native",
        started=datetime(2026, 1, 1, tzinfo=UTC),
        finished=datetime(2026, 1, 1, 0, 1, tzinfo=UTC),
        exit=1,
        interrupted=False,
        stopped="",
        variants=("alltoall",),
        waivers=(waiving.load(None, NAMES, TODAY).held),
    )
    failed = record("EXCH-05", "fail", message="combine: y is wrong", kind="WrongOutput", stage="combine", blamed=(1,))
    records = [record("EXCH-01", "pass", worst=0.5, bits=(4, 1)), failed, record("EXCH-09", "refused", message="no")]
    return result.document(result.head(facts), tuple(spec.load().values()), records)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in plain data."""
    found = [path] if path else []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(inner, (*path, key))
    return found


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return plain data with another value, or without it, at a path."""
    value = copy.deepcopy(value)
    *way, last = path
    inner = value
    for key in way:
        inner = inner[key]
    if new is ...:
        del inner[last]
    else:
        inner[last] = new
    return value


DOCUMENT = document()
EVEN = next(iter(corpus("alltoall", Layout(2, ep=2), "quick")))
EXAMPLE = {"said": {"backend": "native"}, "workload": to_json(EVEN)}
PLACES = places({**DOCUMENT, "requirements": DOCUMENT["requirements"][:3]})


def outcome_of(read: Callable[[], Read], error: type[Exception]) -> tuple[Read | None, str | None]:
    """Return what was read, or the words of the one error that reading may end with."""
    try:
        return read(), None
    except error as refused:
        return None, str(refused)


def one_sentence(*arguments: str) -> str:
    """Run a command that must end with status 2, and return its sentence."""
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert 2 == done.exit_code, done.output
    (sentence,) = done.output.splitlines()
    assert sentence.startswith("Error: ")
    return sentence


class TestFiles:
    @pytest.mark.parametrize("read", [reading.json_of, reading.toml_of], ids=["json", "toml"])
    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (b"\xff", "no text in UTF-8"),
            (b"{", "it is not"),
            (b"x = " + b"[" * 5000 + b"]" * 5000, "it is n"),
            (b"x = " + b"9" * 5000, "it is not"),
        ],
    )
    def test_what_is_in_it(self, tmp_path: Path, read: Callable[[Path], Any], content: bytes, sentence: str) -> None:
        """One error, and no other exception."""
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(reading.Unreadable, match=sentence):
            read(tmp_path / "file")

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (DEEP, "nested more than 64 deep"),
            ("[" * 70 + "]" * 70, "nested more than 64 deep"),
            ("NaN", "NaN is no number"),
            ("1e999", "larger than any float"),
            ("9" * 30, "more than 20 digits"),
            ('"\\ud800"', "half of a character"),
            ('{"\\ud800": 1}', "half of a character"),
        ],
    )
    def test_json_that_cannot_be_handled(self, content: str, sentence: str) -> None:
        """Python's own reader takes it, or ends by its recursion limit."""
        with pytest.raises(reading.Unreadable, match=sentence):
            reading.json_from(content)

    def test_what_is_no_file(self, tmp_path: Path) -> None:
        """A folder, a pipe on which nobody writes, nothing, and a file that is too large."""
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "large").write_text("1" * 11)
        for name, sentence in (
            ("", "Is a directory"),
            ("pipe", "regular"),
            ("none", "No such file"),
            ("large", "larger"),
        ):
            with pytest.raises(reading.Unreadable, match=sentence):
                reading.json_of(tmp_path / name, most=10)

    def test_a_schema_says_where(self) -> None:
        """The first place that does not fit, and what was expected there."""
        numbers = {"type": "array", "items": {"enum": [1, 2]}}
        schema = {"type": "object", "properties": {"a": numbers}, "required": ["a"]}
        values: list[Any] = [{"a": [1, 2]}, {}, {"a": [1, "x"]}, []]
        found = [reading.mismatch(value, schema) for value in values]
        assert [None, "it has no a", "it.a[1] is 'x', expected: one of 1, 2"] == found[:3]
        assert ["it is a list of 0, expected: object"] == found[3:]


class TestReports:
    def written(self, folder: Path, content: Any) -> Path:
        """Write a report."""
        folder.mkdir(exist_ok=True)
        (folder / result.NAME).write_text(json.dumps(content))
        return folder

    @FUZZED
    @given(path=st.sampled_from(PLACES), new=st.sampled_from([..., *ODD]))
    def test_any_value_may_be_wrong(self, tmp_path: Path, path: tuple[Any, ...], new: Any) -> None:
        """The report is read as before, or refused in one sentence; what is read can be compared, merged and shown."""
        folder = self.written(tmp_path / "one", changed(DOCUMENT, path, new))
        _, refused = outcome_of(lambda: result.read(folder), result.NoReport)
        if refused is not None:
            assert 1 == len(refused.splitlines())
            one_sentence("compare", str(folder), str(folder))
            return
        for arguments in (["compare", str(folder), str(folder)], ["page", str(folder)], ["table", str(folder)]):
            done = CliRunner().invoke(cli.main, arguments)
            assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, repr(done.exception))
        merged = CliRunner().invoke(cli.main, ["merge", str(folder), "--report", str(tmp_path / "merged")])
        assert merged.exception is None or isinstance(merged.exception, SystemExit), repr(merged.exception)

    @pytest.mark.parametrize("text", [DEEP, "[]", "3", '{"schema": [3]}', '{"schema": 3}', "{", "\0"])
    def test_what_is_no_report(self, tmp_path: Path, text: str) -> None:
        """Deep, of another type, or cut off."""
        (tmp_path / result.NAME).write_text(text)
        for arguments in (["compare", str(tmp_path), str(tmp_path)], ["page", str(tmp_path)], ["table", str(tmp_path)]):
            assert str(tmp_path) in one_sentence(*arguments)

    @FUZZED
    @given(data=st.data())
    def test_the_records_of_a_run_that_was_killed(self, tmp_path: Path, data: st.DataObject) -> None:
        """A line is a record with fields of their types, or the report is refused."""
        kept = record("EXCH-05", "fail", message="wrong", blamed=(1,), drawn={"batches": 1}, worst=2.0).to_json()
        path = data.draw(st.sampled_from(places(kept)))
        line = json.dumps(changed(kept, path, data.draw(st.sampled_from([..., *ODD]))))
        folder = self.written(tmp_path, {**DOCUMENT, "finished": None, "records": []})
        (folder / journal.NAME).write_text(f"{line}\n")
        report, refused = outcome_of(lambda: result.read(folder), result.NoReport)
        if report is None:
            assert 1 == len((refused or "").splitlines())
        else:
            (read,) = report.records
            assert read == type(read).from_json(read.to_json())


class TestWaivers:
    TABLES = reading.toml_from(GOOD)

    @FUZZED
    @given(path=st.sampled_from(places(TABLES)), new=st.sampled_from([..., *ODD, float("inf"), float("nan")]))
    def test_any_value_may_be_wrong(self, path: tuple[Any, ...], new: Any) -> None:
        """A file is refused, or its waiver is said to be wrong, or it still holds."""
        tables = changed(self.TABLES, path, new)
        read = partial(waiving.valid, Path("some.toml"), GOOD, tables, NAMES, TODAY)
        waivers, refused = outcome_of(read, reading.Unreadable)
        if waivers is None:
            assert 1 == len((refused or "").splitlines())
        else:
            assert all(1 == len(problem.splitlines()) for problem in waivers.problems)
            assert waivers.problems or waivers.held or waivers.elsewhere or not tables.get("waiver")

    @pytest.mark.parametrize("text", [f"x = {DEEP}", "waiver = [3]", "waiver = [[]]", "waiver = 3", "\0"])
    def test_what_is_no_waivers(self, tmp_path: Path, text: str) -> None:
        """Status 2 before a rank starts."""
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(waiving.Unreadable, match=r"mine\.toml"):
            waiving.load(tmp_path / "mine.toml", NAMES, date(2026, 1, 1))


class TestFloors:
    @pytest.mark.parametrize("text", [f"x = {DEEP}", "x = 3", "versions = 3", "x = {y = 3}", "x = [", "\0"])
    def test_what_is_no_floor(self, tmp_path: Path, text: str) -> None:
        """One sentence that names the file."""
        (tmp_path / "some.toml").write_text(text)
        with pytest.raises(floor_file.Unreadable, match=r"some\.toml"):
            floor_file.read(tmp_path / "some.toml")


class TestExamples:
    @FUZZED
    @given(data=st.data())
    def test_any_value_may_be_wrong(self, tmp_path: Path, data: st.DataObject) -> None:
        """An example is read, or refused in one sentence."""
        path = data.draw(st.sampled_from(places(EXAMPLE)))
        content = changed(EXAMPLE, path, data.draw(st.sampled_from([..., *ODD])))
        (tmp_path / "example.json").write_text(json.dumps(content))
        workload, refused = outcome_of(lambda: load(tmp_path / "example.json"), BadExample)
        assert int(workload is None) == len((refused or "").splitlines())

    @pytest.mark.parametrize("text", [DEEP, "[]", "3", "{}", "{", "\0"])
    def test_what_is_no_example(self, tmp_path: Path, text: str) -> None:
        """`replay` says so."""
        (tmp_path / "example.json").write_text(text)
        assert "example.json" in one_sentence("replay", str(tmp_path / "example.json"))
