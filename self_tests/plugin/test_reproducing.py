"""Scripts that a failure leaves in the report folder, run as a user runs them: by python, and by torchrun."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_conformance.engine import EngineError, store
from moe_conformance.plugin.options import Options
from moe_conformance.plugin.run import prepare
from moe_conformance.plugin.scripts import MOST, Scripts
from moe_conformance.report.records import Record
from moe_conformance.reproducing.checks import CannotRun, Named, prepared
from moe_conformance.reproducing.mailbox import Mailbox
from self_tests.plugin import plugin_runs
from self_tests.plugin.plugin_runs import TOY, Finished, record

PLANT = "expert-gradients-times-ep"
NAME = "GRAD-05-alltoall-ep2-own-even.py"
FINISHES = "test_exchange:TestBehaviour.test_every_rank_finishes"

TOYS: dict[str, Any] = {
    "backend": TOY,
    "requirement": "EXCH-09",
    "check": FINISHES,
    "variant": "right",
    "layout": "ep2",
    "workload": "even",
    "ranks": 2,
}
ADAPTER = """
import os
import time

from self_tests.plugin.project.backend import *


class Special(AllToAllExchange):
    def dispatch(self, x, routing):
        {}
        return super().dispatch(x, routing)


EXCHANGES["right"] = Special
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """Return the folder in which a planted bug was run on two ranks, with its report below, and what was printed."""
    folder = tmp_path_factory.mktemp("planted")
    asked = ("--plant", PLANT, "--only", "GRAD-05", "--ranks", "2", "--report", "report")
    return folder, plugin_runs.cli("run", *asked, "--", "-k", "alltoall-ep2-own-even]", cwd=folder)


@pytest.fixture(scope="module")
def script(planted: tuple[Path, Finished]) -> Path:
    """Return the script that the run has left."""
    return planted[0] / "report" / "reproduce" / NAME


def by_torchrun(script: Path, ranks: int) -> Finished:
    """Run a script under torchrun."""
    return plugin_runs.run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(script)), cwd=script.parent
    )


def written(folder: Path, **changed: object) -> Path:
    """Write a script of the toy."""
    path = folder / "script.py"
    given = ", ".join(f"{name}={value!r}" for name, value in {**TOYS, **changed}.items())
    path.write_text(f"from moe_conformance.reproducing import reproduce\n\nreproduce({given})\n")
    return path


def ran(folder: Path, **changed: object) -> Finished:
    """Run a script of the toy."""
    return plugin_runs.run(str(written(folder, **changed)), cwd=folder)


def arguments(script: Path) -> dict[str, Any]:
    """Return the arguments of the one call that a script ends with."""
    last = ast.parse(script.read_text()).body[-1]
    assert isinstance(last, ast.Expr)
    assert isinstance(last.value, ast.Call)
    return {each.arg or "": ast.literal_eval(each.value) for each in last.value.keywords}


def _factor(message: str) -> str:
    """Return a message up to the cause, which a run finds on other layouts, and a script runs on one."""
    factor, told, _ = message.partition(" the expected value: ")
    assert told
    return factor + told


class TestAScript:
    def test_python_starts_its_ranks(self, planted: tuple[Path, Finished], script: Path) -> None:
        """It fails with the sentence of the run, and needs no folder to be run in."""
        (failed,) = plugin_runs.records(plugin_runs.result(planted[0] / "report")).values()
        done = plugin_runs.run(str(script), cwd=Path("/"))
        assert (1, 1) == (done.status, done.output.count(f"GRAD-05 fails: {_factor(failed.message)}"))

    def test_torchrun_starts_its_ranks(self, planted: tuple[Path, Finished], script: Path) -> None:
        """Each process is a rank; rank 0 prints the sentence."""
        (failed,) = plugin_runs.records(plugin_runs.result(planted[0] / "report")).values()
        done = by_torchrun(script, 2)
        assert (1, 1) == (done.status, done.output.count(f"GRAD-05 fails: {_factor(failed.message)}"))

    def test_what_is_right_passes(self, script: Path) -> None:
        """The same script of native itself ends with 0."""
        backend = arguments(script)["backend"]
        other = script.with_name("other.py")
        other.write_text(script.read_text().replace(repr(backend), repr("native")))
        assert Finished(0, "GRAD-05 passes\n") == plugin_runs.run(str(other), cwd=script.parent)

    def test_it_is_short_and_names_all(self, planted: tuple[Path, Finished], script: Path) -> None:
        """It has one call, whose arguments are literals, and the folder in which the run was started."""
        expected = {
            "requirement": "GRAD-05",
            "check": "test_gradients:TestOwnExperts.test_experts_get_the_gradient_of_all_ranks",
            "variant": "alltoall",
            "layout": "ep2",
            "workload": "own-even",
            "ranks": 2,
            "device": "cpu",
            "profile": "quick",
        }
        found = arguments(script)
        assert expected == {name: found[name] for name in expected}
        text = script.read_text()
        assert f"sys.path.append({str(planted[0])!r})" in text
        assert len(text.splitlines()) <= 25

    def test_the_failure_names_it(self, planted: tuple[Path, Finished]) -> None:
        """When it happens and at the end, behind the command."""
        assert 2 == planted[1].output.count(f"\nscript: report/reproduce/{NAME}\n")


class TestRanksThatFail:
    def test_one_raises(self, tmp_path: Path) -> None:
        """Its peers wait for it and are not blamed; its traceback is printed."""
        done = ran(tmp_path, variant="raises")
        assert 1 == done.status
        assert "rank 0 raised\nTraceback" in done.output
        assert done.output.endswith(
            "EXCH-09 fails: run: rank 0 raised in forward:0: ZeroDivisionError: the toy is broken\n"
        )

    def test_all_wait_for_each_other(self, tmp_path: Path) -> None:
        """That is noticed without a deadline, and rank 0 tells it although it waits itself."""
        done = ran(tmp_path, variant="waits")
        assert 1 == done.status
        assert "rank 0 hung: waits in a collective that cannot complete: in wait, from " in done.output

    def test_one_dies(self, tmp_path: Path) -> None:
        """Rank 0 tells which, and by which signal."""
        (tmp_path / "adapter.py").write_text(ADAPTER.format("self.topology.rank and os.kill(os.getpid(), 9)"))
        done = ran(tmp_path, backend="adapter:Toy")
        assert 1 == done.status
        assert "rank 0 lost its peers: " in done.output
        assert done.output.endswith("EXCH-09 fails: run: rank 1 died: killed by SIGKILL\n")

    def test_a_deadline(self, tmp_path: Path) -> None:
        """Ranks that give no answer for so long hang."""
        done = ran(tmp_path, variant="waits", deadline_s=1.0)
        assert (1, True) == (done.status, "no answer within 1.0 s" in done.output)


class TestWhatCannotRun:
    @pytest.mark.parametrize(
        ("changed", "sentence"),
        [
            ({"backend": "nowhere:Backend"}, "backend nowhere:Backend: "),
            ({"workload": "nothing"}, "there is no case right-ep2-nothing of "),
            ({"check": "test_exchange:test_nothing"}, "there is no check test_exchange:test_nothing "),
            ({"ranks": 1}, "ep2 is a layout of 2 ranks, not of 1"),
            ({"layout": "ep4", "ranks": 4}, "ep4 is a layout of 4 ranks, and 2 processes were launched"),
        ],
    )
    def test_it_says_why(self, changed: dict[str, Any], sentence: str) -> None:
        """Whatever is not here is told in a sentence."""
        named = Named(**{**TOYS, "device": "cpu", "profile": "quick", "asynchrony": "plain", **changed})
        with pytest.raises(CannotRun, match=f"^{sentence}"):
            prepared(named, 2)

    def test_rank_0_says_it_once(self, tmp_path: Path) -> None:
        """The status is 2, of what is not here and of what a library refuses."""
        found = [ran(tmp_path, **changed) for changed in ({"workload": "nothing"}, {"variant": "refuses"})]
        assert [2, 2] == [each.status for each in found]
        assert found[0].output.startswith("cannot run: there is no case right-ep2-nothing of ")
        assert "cannot run: refused by the library: the toy does not like it\n" == found[1].output

    def test_a_check_in_new_processes(self, tmp_path: Path) -> None:
        """Runs that a check asks for in new processes are pytest's alone."""
        done = ran(
            tmp_path,
            backend="native",
            requirement="DET-01",
            check="test_determinism:TestRepetition.test_fresh_processes_give_the_same_bits",
            variant="alltoall",
            workload="own-even",
        )
        assert (2, True) == (done.status, "compares runs in new processes" in done.output)


class TestTheEnd:
    def started(self, folder: Path, mark: str) -> subprocess.Popen[str]:
        """Return a script that waits for ever, once its ranks are at work: each says so in one write."""
        (folder / "adapter.py").write_text(ADAPTER.format("os.write(1, b'at work\\n'); time.sleep(600)"))
        process = subprocess.Popen(
            [sys.executable, str(written(folder, backend="adapter:Toy"))],
            env=plugin_runs.environment(mark),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert ["at work\n"] * 2 == [process.stdout.readline(), process.stdout.readline()]
        return process

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
    def test_no_rank_outlives_the_script(self, tmp_path: Path, number: int, status: int) -> None:
        """However it is ended."""
        with self.started(tmp_path, mark := str(tmp_path)) as process:
            process.send_signal(number)
            assert status == process.wait(plugin_runs.LIMIT_S)
        assert plugin_runs.comes(lambda: not list(plugin_runs.marked(mark)))

    def test_ctrl_c_ends_all(self, tmp_path: Path) -> None:
        """It reaches all processes of the terminal; there is no traceback."""
        with self.started(tmp_path, mark := str(tmp_path)) as process:
            os.killpg(process.pid, signal.SIGINT)
            assert 130 == process.wait(plugin_runs.LIMIT_S)
        assert plugin_runs.comes(lambda: not list(plugin_runs.marked(mark)))


def failed(workload: str = "even", message: str = "wrong", **changed: Any) -> Record:
    """Return a record of a check that there is."""
    given = record("EXCH-09", "crash", message=message, kind="Raised")
    node = f"a/test_exchange.py::TestBehaviour::test_every_rank_finishes[alltoall-ep2-{workload}]"
    return replace(given, node=node, check="test_every_rank_finishes", workload=workload, **changed)


class TestScripts:
    def scripts(self, folder: Path, **options: Any) -> Scripts:
        """Return those of a run with this report folder."""
        return Scripts(prepare(Options(report=str(folder), **options)))

    def test_one_for_each_kind(self, tmp_path: Path) -> None:
        """The first failure of a kind has one; a second kind on the same case has a name of its own."""
        scripts = self.scripts(tmp_path)
        found = [scripts.write(each) for each in (failed(), failed("uneven"), failed(message="otherwise"))]
        names = [None if path is None else path.name for path in found]
        assert ["EXCH-09-alltoall-ep2-even.py", None, "EXCH-09-alltoall-ep2-even-2.py"] == names

    def test_at_most_twenty(self, tmp_path: Path) -> None:
        """Further kinds have none."""
        scripts = self.scripts(tmp_path)
        found = [scripts.write(failed(message="x" * number)) for number in range(1, MOST + 3)]
        assert [True] * MOST + [False] * 2 == [path is not None for path in found]

    def test_what_has_none(self, tmp_path: Path) -> None:
        """Neither drawn batches, nor what is no failure of a backend, nor virtual ranks; nor a run without a report."""
        scripts = self.scripts(tmp_path)
        for given in (failed(), record("EXCH-01", "pass"), replace(failed(), verdict="error")):
            drawn = replace(given, workload=None)
            assert scripts.write(drawn if given.verdict == "crash" else given) is None
        assert self.scripts(tmp_path, profile="virtual", ranks=8).write(failed()) is None
        assert Scripts(prepare(Options())).write(failed()) is None
        assert [] == list(tmp_path.iterdir())

    def test_the_checkout_of_the_library_is_imported_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in the run: before anything of the suite looks for the library."""
        monkeypatch.setattr(sys, "path", [*sys.path])
        path = self.scripts(tmp_path, library=str(tmp_path)).write(failed())
        assert path is not None
        lines = path.read_text().splitlines()
        (number,) = [at for at, line in enumerate(lines) if line.startswith(f"sys.path.insert(0, {str(tmp_path)!r})")]
        assert number < lines.index("reproduce(")

    def test_values_are_escaped(self, tmp_path: Path) -> None:
        """Whatever a name or a message holds is data; the message stays in its comment."""
        name = "a'\"\\\n)/b"
        path = self.scripts(tmp_path).write(failed(message="a\rimport nothing\x0c\x00", variant=name))
        assert path is not None
        assert name == arguments(path)["variant"]
        assert "# crash: a import nothing  " in path.read_text().splitlines()
        assert tmp_path / "reproduce" == path.parent


class TestMailbox:
    @pytest.mark.parametrize("secret", [b"another", b""])
    def test_what_no_rank_has_signed_is_not_read(self, secret: bytes) -> None:
        """Whoever reaches the store can write to it; a pickle of theirs is not loaded."""
        listener = store.listen("127.0.0.1")
        port = listener.getsockname()[1]
        served = store.serve(listener)
        own = Mailbox("127.0.0.1", port, b"of the ranks")
        own.put("1/answer/0", {"right": True})
        Mailbox("127.0.0.1", port, secret).put("1/answer/1", {"right": False})
        assert {"right": True} == own.take("1/answer/0")
        with pytest.raises(EngineError, match="'1/answer/1' in the store was put there by no rank"):
            own.take("1/answer/1")
        del served
