"""A case is recorded, read, and judged again: what changes the verdict shows, and so does another workload."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from moe_conformance.backends.native import Native
from moe_conformance.cli import main
from moe_conformance.recorded import again, files, recording
from moe_conformance.recorded.files import Recorded
from moe_conformance.recorded.pools import BadRecording
from moe_conformance.recorded.workloads import fingerprint
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.plan import Plan

CASE = "alltoall-single-even"  # with twins
OUTPUT = "test_exchange:TestCombine.test_tokens_get_the_weighted_sum_of_their_experts"
TWINS = "test_equivalence:"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Return the cases of native."""
    return Plan(Native(), "cpu", "quick")


@pytest.fixture(scope="module")
def path(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a case once for all tests; return its document."""
    subject = recording.Subject("native", Native(), {"torch": "2.13.0"})
    folder = tmp_path_factory.mktemp("recorded")
    recording.record(subject, recording.named_cases(plan, [CASE]), folder, lambda line: None)
    return folder / "native" / "2.13.0" / f"{CASE}.json"


@pytest.fixture
def recorded(path: Path) -> Recorded:
    """Read it."""
    return files.read(path)


def sentences(recorded: Recorded, plan: Plan) -> list[str]:
    """Judge a case again, and return in what it differs."""
    return list(again.differences(recorded, again.judged_again(recorded, plan)))


def run(*arguments: str | Path) -> Any:
    """Run the command line in this process."""
    return CliRunner().invoke(main, [str(each) for each in arguments])


class TestJudgedAgain:
    def test_verdicts_are_the_same(self, recorded: Recorded, plan: Plan) -> None:
        """Of checks of the run, and of those that compare it with twins."""
        assert [] == sentences(recorded, plan)
        assert "pass" == recorded.verdicts[OUTPUT].verdict
        assert any(check.startswith(TWINS) and each.verdict == "pass" for check, each in recorded.verdicts.items())

    def test_another_judgement_shows(self, recorded: Recorded, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        """Here since the output is read otherwise: the sentence names case, check, and both verdicts."""
        outcome_of = files.Ran.outcome

        def changed(ran: files.Ran, workload: Any) -> Outcome:
            outcome = outcome_of(ran, workload)
            outcome.ranks[0].microbatches[0].y[0, 0] += 1
            return outcome

        monkeypatch.setattr(files.Ran, "outcome", changed)
        found = [sentence for sentence in sentences(recorded, plan) if OUTPUT in sentence]
        assert 1 == len(found)
        assert found[0].startswith(f"{CASE}: {OUTPUT} is fail WrongOutput at combine")
        assert "; it was pass with" in found[0]

    def test_fewer_comparisons_show(self, recorded: Recorded, plan: Plan) -> None:
        """As many elements are compared as were, or it is said."""
        more = replace(recorded.verdicts[OUTPUT], elements=recorded.verdicts[OUTPUT].elements + 1)
        verdicts = {OUTPUT: more, "test_exchange:TestGone.test_gone": more}
        found = sentences(replace(recorded, verdicts=verdicts), plan)
        assert 2 == len(found)
        assert "no check test_exchange:TestGone.test_gone reads it" in found[1]

    def test_a_workload_that_is_drawn_otherwise(self, recorded: Recorded, plan: Plan) -> None:
        """Says which command records it anew; so does one that is gone, and a twin."""
        other = replace(recorded, ran=replace(recorded.ran, workload="0" * 32))
        with pytest.raises(again.DrawnOtherwise, match="`moe-conformance record --backend native --cases FILE"):
            again.judged_again(other, plan)
        with pytest.raises(again.DrawnOtherwise, match="no case alltoall-single-gone today; record it anew"):
            again.judged_again(replace(recorded, workload="gone"), plan)
        found = sentences(replace(recorded, twins={}), plan)
        assert found
        assert all(TWINS in each or "record it anew" in each for each in found)

    def test_a_fingerprint_tells_workloads_apart(self, plan: Plan) -> None:
        """By a single element, and by an option."""
        (case,) = recording.named_cases(plan, [CASE])
        workload = case.workload
        batch = workload.batches[0][0]
        changed = replace(batch, weights_TK=torch.nextafter(batch.weights_TK, torch.ones(())))
        others = [replace(workload, batches=((changed,),)), replace(workload, memory="filled")]
        assert 3 == len({fingerprint(each) for each in (workload, *others)})


class TestFiles:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda content: content.update(format=2), "this version reads format 1"),
            (lambda content: content.pop("twins"), "no recorded case: KeyError"),
            (lambda content: content["verdicts"].update(x={"verdict": "pass", "size": 1}), "no recorded case"),
            (lambda content: content.update(variant=3), "no text"),
            (lambda content: content.update(variant="../other"), "it holds the case '../other-single-even'"),
        ],
    )
    def test_what_is_no_recording(self, path: Path, tmp_path: Path, change: Any, words: str) -> None:
        """Is refused with a sentence that names the file."""
        content = json.loads(path.read_text("utf-8"))
        change(content)
        (tmp_path / path.name).write_text(json.dumps(content), encoding="utf-8")
        (tmp_path / path.name).with_suffix(files.TENSORS).write_bytes(path.with_suffix(files.TENSORS).read_bytes())
        with pytest.raises(BadRecording, match=words) as caught:
            files.read(tmp_path / path.name)
        assert str(tmp_path) in str(caught.value)

    def test_tensors_that_are_not_there(self, path: Path, tmp_path: Path) -> None:
        """Or that end before they should."""
        copied = tmp_path / path.name
        copied.write_text(path.read_text("utf-8"), encoding="utf-8")
        with pytest.raises(BadRecording, match="no recorded case: FileNotFoundError"):
            files.read(copied)
        copied.with_suffix(files.TENSORS).write_bytes(path.with_suffix(files.TENSORS).read_bytes()[:-1])
        with pytest.raises(BadRecording, match="no recorded case: SafetensorError"):
            files.read(copied)


class TestCommands:
    def test_rejudge(self, path: Path, tmp_path: Path) -> None:
        """It prints what differs and exits with 1; what is accepted differs no more."""
        recorded = files.read(path)
        verdicts = {**recorded.verdicts, OUTPUT: replace(recorded.verdicts[OUTPUT], verdict="fail")}
        files.write(tmp_path, replace(recorded, verdicts=verdicts))
        found = run("rejudge", tmp_path)
        assert (1, True) == (found.exit_code, f"{CASE}: {OUTPUT} is pass" in found.output)
        assert 0 == run("rejudge", tmp_path, "--accept").exit_code
        found = run("rejudge", tmp_path)
        assert (0, "1 recordings, 0 verdicts differ\n") == (found.exit_code, found.output)
        assert recorded.verdicts == files.read(tmp_path / path.name).verdicts

    def test_a_backend_that_is_not_registered(self, path: Path, tmp_path: Path) -> None:
        """Is not imported: a file may be from elsewhere."""
        files.write(tmp_path, replace(files.read(path), backend="antigravity:geohash"))
        found = run("rejudge", tmp_path)
        assert (2, True) == (found.exit_code, "'antigravity:geohash', which is no registered backend" in found.output)
        assert "antigravity" not in sys.modules

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["rejudge", "nowhere"], "no recordings in nowhere"),
            (["record", "--output", "x"], "--only ID,ID or --cases FILE"),
            (["record", "--output", "x", "--only", "EXCH-999"], "no requirement EXCH-999"),
            (["record", "--output", "x", "--cases", "nowhere"], "No such file"),
        ],
    )
    def test_what_cannot_run(self, arguments: list[str], words: str) -> None:
        """It exits with 2 and says why."""
        found = run(*arguments)
        assert 2 == found.exit_code
        assert words in found.output

    def test_a_case_that_there_is_not(self, plan: Plan) -> None:
        """Neither by its id, nor of a requirement that no case is for."""
        with pytest.raises(BadRecording, match="there is no case alltoall-single-nothing"):
            recording.named_cases(plan, ["alltoall-single-nothing"])
        with pytest.raises(BadRecording, match="no check reads a case of native for GROUP-01"):
            recording.first_cases(plan, ["EXCH-01", "GROUP-01"])
