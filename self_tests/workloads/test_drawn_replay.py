"""A drawn failure through the command line: what is told and kept, and the one command that runs it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from moe_conformance import cli
from moe_conformance.report.records import Record
from self_tests.plugin import plugin_runs

CHECK = "test_a_drawn_batch_passes_every_exact_judgement[alltoall-ep2]"


@dataclass(frozen=True)
class Judged:
    """A run of one search in a planted bug, and its report."""

    folder: Path
    output: str
    record: Record
    drawn: dict[str, dict[str, int]]

    def replay(self, *more: str) -> plugin_runs.Finished:
        """Run the command that the run has printed, and nothing else."""
        (command,) = self.record.replay
        program, *arguments = shlex.split(command)
        assert "moe-conformance" == program
        return plugin_runs.cli(*arguments, *more, cwd=self.folder)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """One bug, one cell."""
    folder = tmp_path_factory.mktemp("run")
    asked = ("--plant", "map-of-nonzero-weights", "--ranks", "2", "--report", "report", "--", "-k", CHECK)
    done = plugin_runs.cli("run", *asked, cwd=folder)
    report = plugin_runs.result(folder / "report")
    records = [record for record in plugin_runs.records(report).values() if record.verdict == "fail"]
    return Judged(folder, done.output, records[0], report["drawn"])


class TestReport:
    def test_the_smallest_batch_is_told_with_its_command(self, judged: Judged) -> None:
        """In the terminal, below what is wrong with it."""
        assert "rank 1 token 0 slot 0 was not delivered to expert 0 on rank 0" in judged.output
        assert "drawn: E = 2, K = 1, D = 32, float32, schedule F0 B0" in judged.output
        assert f"replay: {judged.record.replay[0]}" in judged.output

    def test_it_is_kept_as_data(self, judged: Judged) -> None:
        """A small file of its own, with what was said of it."""
        path = judged.folder / shlex.split(judged.record.replay[0])[2]
        assert path.stat().st_size < 4096
        content = json.loads(path.read_text("utf-8"))
        assert judged.record.message == content["said"]["diagnosis"]
        assert [0.0] == content["workload"]["batches"][0][1]["weights"]["values"]

    def test_what_was_drawn_is_counted(self, judged: Judged) -> None:
        """By item and for the run, and in one line of the terminal."""
        assert judged.record.drawn == next(iter(judged.drawn.values()))
        assert 10 < judged.record.drawn["batches"]
        assert f"drawn: {judged.record.drawn['batches']} batches; rarest of" in judged.output


class TestReplay:
    def test_it_fails_again_in_the_same_words(self, judged: Judged) -> None:
        """With the command as it was printed."""
        done = judged.replay()
        assert 1 == done.status
        assert f"fail\n{judged.record.message}\n{judged.record.detail}\n" == done.output

    def test_it_passes_where_the_bug_is_not(self, judged: Judged) -> None:
        """The same file, another backend: native without the bug."""
        path = shlex.split(judged.record.replay[0])[2]
        done = plugin_runs.cli("replay", path, "--backend", "native", cwd=judged.folder)
        assert (0, "pass\n") == (done.status, done.output)

    def test_a_registered_backend_is_taken_from_the_file(self, judged: Judged, tmp_path: Path) -> None:
        """Without a backend on the command line; a line says so."""
        path = shlex.split(judged.record.replay[0])[2]
        content = json.loads((judged.folder / path).read_text("utf-8"))
        other = tmp_path / "other.json"
        other.write_text(json.dumps(content | {"said": content["said"] | {"backend": "native"}}), "utf-8")
        done = plugin_runs.cli("replay", str(other), cwd=judged.folder)
        assert (0, f"backend: native, as {other} says\npass\n") == (done.status, done.output)

    def test_no_module_is_imported_for_a_file(self, judged: Judged) -> None:
        """One that names a backend by dotted path is not run without it on the command line, which is told."""
        path = shlex.split(judged.record.replay[0])[2]
        named = json.loads((judged.folder / path).read_text("utf-8"))["said"]["backend"]
        done = plugin_runs.cli("replay", path, cwd=judged.folder)
        assert ":" in named
        assert (2, True) == (done.status, f"is of the backend {named}; add --backend {named}" in done.output)

    @pytest.mark.parametrize("said", [{}, {"backend": 3}, "native"])
    def test_a_file_that_names_no_backend_is_refused(self, judged: Judged, tmp_path: Path, said: Any) -> None:
        """With its path and what it says instead."""
        path = shlex.split(judged.record.replay[0])[2]
        content = json.loads((judged.folder / path).read_text("utf-8"))
        other = tmp_path / "other.json"
        other.write_text(json.dumps(content | {"said": said}), "utf-8")
        done = CliRunner().invoke(cli.main, ["replay", str(other)])
        assert 2 == done.exit_code
        assert f"{other} holds no example: said.backend" in done.output

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["none.json"], "none.json holds no example: it cannot be read"),
            ([__file__], "holds no example: it is not JSON"),
            (["{}", "--backend", "no-such"], "unknown backend 'no-such'"),
            (["{}", "--plant", "no-such"], "unknown plant 'no-such'"),
            (["{}", "--backend", plugin_runs.TOY], "for a variant 'alltoall'; the backend has right, wrong"),
        ],
    )
    def test_what_cannot_be_judged_is_said(self, judged: Judged, arguments: Sequence[str], words: str) -> None:
        """In a sentence, with exit status 2; no rank starts."""
        path = judged.folder / shlex.split(judged.record.replay[0])[2]
        done = CliRunner().invoke(cli.main, ["replay", *(each.format(path) for each in arguments)])
        assert 2 == done.exit_code
        assert words in done.output
