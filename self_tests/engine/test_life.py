"""An engine starts with its preload and environment, and ends without leaving a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_conformance.engine import Engine, EngineError, Job

CHECKOUT = Path(__file__).parents[2]
JOBS = "self_tests.engine.engine_jobs"

DRIVER = """
import os, sys
from moe_conformance.engine import Engine, Job
engine = Engine(preload=("self_tests.engine.engine_jobs",))
ranks = [rank.value for rank in engine.run(Job("self_tests.engine.engine_jobs:pid", None, 2, {})).ranks]
left = [rank.value for rank in engine.run(Job("self_tests.engine.engine_jobs:start_a_sleeper", None, 2, {})).ranks]
print(*{pid for pids in ranks for pid in pids}, *left, flush=True)
"""


# The fork keeps the descriptors of the driver open.
FORK_AND_EXIT_HARD = """
os.close(1)
if os.fork() == 0:
    import time
    time.sleep(60)
os._exit(1)
"""


def alive(pid: int) -> bool:
    """Returns True if a process runs; False for a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def survivors(pids: list[int]) -> list[int]:
    """Returns the pids that still run after up to half a minute."""
    until = time.monotonic() + 30
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


@pytest.fixture
def driver() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], list[int]]]]:
    """Starts drivers, each with two ranks that left a process behind; returns the driver and all these pids."""
    started = []

    def start(ending: str) -> tuple[subprocess.Popen[str], list[int]]:
        script = DRIVER + textwrap.dedent(ending)
        command = [sys.executable, "-c", script]
        process = subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, [int(pid) for pid in process.stdout.readline().split()]

    yield start
    for process in started:
        process.kill()
        process.communicate()


class TestNoOrphans:
    def test_nothing_is_left_after_close(
        self, driver: Callable[[str], tuple[subprocess.Popen[str], list[int]]]
    ) -> None:
        """A closed engine leaves no process behind and has printed all output of its ranks."""
        say = 'engine.run(Job("self_tests.engine.engine_jobs:say", "hello", 2, {}))'
        process, pids = driver(f"{say}\nengine.close()\nprint('closed', flush=True)\nsys.stdin.read()")
        lines = [process.stdout.readline().strip() for _ in range(3)]
        assert ["closed", "rank 0 says hello", "rank 1 says hello"] == sorted(lines)
        assert (5, []) == (len(pids), survivors(pids))
        assert process.poll() is None

    def test_a_warning_is_shown_once(self, driver: Callable[[str], tuple[subprocess.Popen[str], list[int]]]) -> None:
        """A warning is printed once, not by every rank and in every run."""
        warn = 'engine.run(Job("self_tests.engine.engine_jobs:warn", "old", 2, {}))'
        process, _ = driver(f"{warn}\n{warn}\nengine.close()\nprint('closed', flush=True)")
        output = process.stdout.read()
        assert (1, 4) == (output.count("FutureWarning: old"), output.count("goes on"))

    @pytest.mark.parametrize(
        "ending",
        ["", FORK_AND_EXIT_HARD],
        ids=["not closed", "hard exit"],
    )
    def test_nothing_is_left_when_a_driver_ends(
        self, driver: Callable[[str], tuple[subprocess.Popen[str], list[int]]], ending: str
    ) -> None:
        """Ranks, their children and the fork server end with the driver, though the engine was never closed."""
        _, pids = driver(ending)
        assert 5 == len(pids)
        assert [] == survivors(pids)

    def test_nothing_is_left_when_a_driver_is_killed_during_a_job(
        self, driver: Callable[[str], tuple[subprocess.Popen[str], list[int]]]
    ) -> None:
        """Ranks that hold the GIL or wait in a collective end with a driver that is killed."""
        spin = 'engine.run(Job("self_tests.engine.engine_jobs:spin_before_collective", 0, 2, {}))'
        process, pids = driver(spin)
        assert [] == [pid for pid in pids if not alive(pid)]
        time.sleep(0.3)
        process.send_signal(signal.SIGKILL)
        assert [] == survivors(pids)

    def test_an_engine_lives_from_its_making_to_its_closing(self) -> None:
        """The thread that made it may end; closing twice is allowed, running afterwards is not."""
        made = []
        thread = threading.Thread(target=lambda: made.append(Engine()))
        thread.start()
        thread.join()
        (engine,) = made
        assert engine.run(Job(f"{JOBS}:echo", None, 1, {})).ok
        engine.close()
        engine.close()
        with pytest.raises(EngineError, match="the engine is closed"):
            engine.run(Job(f"{JOBS}:echo", None, 1, {}))


class TestPreload:
    @pytest.fixture
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
        """Writes an importable module."""
        monkeypatch.syspath_prepend(tmp_path)

        def write(name: str, text: str) -> None:
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))

        return write

    def test_a_preload_that_fails_is_named_with_its_reason(self, module: Callable[[str, str], None]) -> None:
        """The first module that cannot be imported is reported, with the traceback."""
        module("preload_fine", "")
        module("preload_broken", "import preload_fine\nimport no_such_library")
        with pytest.raises(EngineError) as caught:
            Engine(preload=("preload_fine", "preload_broken"))
        sentence, _, details = str(caught.value).partition("\n")
        assert sentence == (
            "preload module 'preload_broken' failed to import: ModuleNotFoundError: No module named 'no_such_library'"
        )
        assert "preload_broken.py" in details

    def test_a_preload_that_ends_the_process_is_named(self, module: Callable[[str, str], None]) -> None:
        """A crash during an import is reported with the module and the signal."""
        module("preload_deadly", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
        with pytest.raises(EngineError, match="ended at 'preload_deadly': killed by SIGKILL"):
            Engine(preload=("preload_deadly",))

    def test_the_environment_is_there_before_the_preload(self, module: Callable[[str, str], None]) -> None:
        """A module reads its variable at import; the driver's own environment stays as it was."""
        module(
            "preload_reads",
            """
            import os
            seen = os.environ["ENGINE_TEST"]

            def tell(context, payload):
                return seen, os.environ["GLOO_SOCKET_IFNAME"]
            """,
        )
        with Engine(preload=("preload_reads",), environment={"ENGINE_TEST": "early"}) as engine:
            result = engine.run(Job("preload_reads:tell", None, 1, {}))
        assert ("early", "lo") == result.ranks[0].value
        assert "ENGINE_TEST" not in os.environ
