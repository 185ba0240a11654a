"""Ranks under the agents of a launcher: faults are handled as locally, and a lost agent ends the run."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from moe_conformance.engine import Engine, EngineError, Job
from moe_conformance.engine.hosts import MachineLostError
from moe_conformance.engine.remote.cluster import RemoteCluster
from self_tests.engine.remote_processes import GIVEN, Processes
from self_tests.engine.test_life import survivors
from self_tests.plugin.plugin_runs import marked

JOBS = "self_tests.engine.engine_jobs"


def job(function: str, payload: object = None, world: int = 3, **named: Any) -> Job:
    """Returns a job of this checkout's functions."""
    return Job(f"{JOBS}:{function}", payload, world, named.pop("groups", {}), **named)


def gone(mark: str) -> bool:
    """Returns True if no process with that mark is left, after up to half a minute."""
    return not survivors(list(marked(mark)))


class Launched:
    """An engine on the processes of one launch."""

    def __init__(self, size: int) -> None:
        self.mark = uuid.uuid4().hex
        self.processes = Processes(size, self.mark)
        self.agents = self.processes.agents
        self.cluster = RemoteCluster(self.processes.driver, GIVEN)
        self.engine = Engine(preload=(JOBS,), cluster=self.cluster)

    def close(self) -> None:
        """Ends the engine and all processes."""
        self.engine.close()
        self.cluster.end(0)
        self.processes.end()


@pytest.fixture(scope="module")
def three() -> Iterator[Launched]:
    """Three processes for all tests of this file."""
    launched = Launched(3)
    yield launched
    launched.close()


@pytest.fixture
def two() -> Iterator[Launched]:
    """Two processes for one test."""
    launched = Launched(2)
    yield launched
    launched.close()


@pytest.fixture
def engine(three: Launched) -> Engine:
    """The engine of the three processes."""
    return three.engine


class TestRanks:
    def test_every_process_has_a_rank(self, engine: Engine) -> None:
        """Rank r's fork server was started by RANK r's process."""
        results = engine.run(job("pid"))
        assert results.ok
        assert 3 == len({parent for _, parent in (rank.value for rank in results.ranks)})

    def test_ranks_meet(self, engine: Engine) -> None:
        """Collectives of the world and of groups work, and values are returned."""
        result = engine.run(job("sums", groups={"pair": ((0, 2),)}))
        assert [{"world": 6.0, "pair": 4.0}, {"world": 6.0}, {"world": 6.0, "pair": 4.0}] == [
            rank.value for rank in result.ranks
        ]

    def test_smaller_worlds_use_the_first_processes(self, engine: Engine) -> None:
        """Worlds of several sizes are kept at the same time."""
        parents = [rank.value[1] for rank in engine.run(job("pid")).ranks]
        for world in (1, 2):
            assert parents[:world] == [rank.value[1] for rank in engine.run(job("pid", world=world)).ranks]

    def test_a_larger_world_is_refused(self, engine: Engine) -> None:
        """The message says how many processes there are."""
        with pytest.raises(EngineError, match="does not fit into the 3 processes"):
            engine.run(job("pid", world=4))
        assert engine.run(job("pid")).ok

    def test_ranks_do_not_see_the_launcher(self, engine: Engine) -> None:
        """RANK and WORLD_SIZE describe the rank's world, and the launcher's other variables are not set."""
        expected = {"RANK": ["0", "1", "2"], "WORLD_SIZE": ["3"] * 3, "TORCHELASTIC_USE_AGENT_STORE": [None] * 3}
        for name, values in expected.items():
            assert values == [rank.value for rank in engine.run(job("variable", name)).ranks]

    def test_what_ranks_print_is_told_with_their_fault(self, engine: Engine) -> None:
        """The output is read from the fork server of another process."""
        result = engine.run(job("print_then_fail", 1))
        assert ["rank 0 line 0\nfrom a child\n", "rank 2 line 0\nfrom a child\n"] == [
            result.ranks[rank].output for rank in (0, 2)
        ]
        assert engine.run(job("pid")).ok


class TestFaults:
    @pytest.mark.parametrize("faulty", [0, 2])
    @pytest.mark.parametrize(
        ("function", "status", "words"),
        [
            ("one_raises", "raised", "ValueError"),
            ("exit_hard", "died", "exited with code 7 before it answered"),
            ("leave", "raised", "SystemExit"),
            ("spin_before_collective", "hung", "no answer within 2.0 s"),
            ("stop_oneself", "hung", "stopped by a signal"),
        ],
    )
    def test_a_fault_is_blamed_and_survived(
        self, engine: Engine, faulty: int, function: str, status: str, words: str
    ) -> None:
        """The faulty rank is named, whichever process it runs under, and the next job runs."""
        result = engine.run(job(function, faulty, deadline_s=2.0 if status == "hung" else 30.0))
        assert (faulty,) == result.blamed
        assert status == result.ranks[faulty].status
        assert words in result.ranks[faulty].error
        assert engine.run(job("pid")).ok

    def test_a_crash_leaves_its_stack(self, engine: Engine) -> None:
        """Faulthandler's dump is read from the file of another process."""
        result = engine.run(job("kill_oneself", (1, signal.SIGSEGV)))
        assert (1,) == result.blamed
        assert "killed by SIGSEGV" == result.ranks[1].error
        assert "in kill_oneself" in result.ranks[1].traceback

    def test_a_skipped_collective_is_proved_without_waiting_for_the_deadline(self, engine: Engine) -> None:
        """Threads and stacks of all processes are read."""
        began = time.monotonic()
        result = engine.run(job("skip_collective", 1, deadline_s=30.0))
        assert time.monotonic() - began < 15
        assert (1,) == result.blamed
        assert ["hung", "ok", "hung"] == [rank.status for rank in result.ranks]
        assert "all_reduce" in result.ranks[2].traceback


class TestPreload:
    def test_a_module_that_one_process_cannot_import_is_told(self, three: Launched) -> None:
        """An engine that cannot start says why, and the next one starts."""
        with pytest.raises(EngineError, match="no_such_module"):
            Engine(preload=("no_such_module",), cluster=three.cluster)
        with Engine(preload=(JOBS,), cluster=three.cluster) as another:
            assert another.run(job("pid")).ok


class TestLoss:
    def test_a_killed_process_ends_the_run(self, two: Launched) -> None:
        """The driver detects it during a job, names the process, and can start no more ranks."""
        assert two.engine.run(job("pid", world=2)).ok
        running = two.engine.start(job("sleep_before_collective", 0, world=2))
        began = time.monotonic()
        two.agents[0].kill()
        with pytest.raises(MachineLostError, match="the process of RANK 1 is lost: it has ended"):
            running.result()
        assert time.monotonic() - began < 10
        with pytest.raises(MachineLostError, match="RANK 1"):
            two.engine.run(job("pid", world=2))
        two.close()
        assert gone(two.mark)

    def test_a_lost_fork_server_is_reported(self, two: Launched) -> None:
        """The agent says why it cannot go on."""
        fork_server = two.engine.run(job("pid", world=2)).ranks[1].value[1]
        os.kill(fork_server, signal.SIGKILL)
        with pytest.raises(MachineLostError, match=r"RANK 1 is lost: .*killed by SIGKILL"):
            two.engine.run(job("sleep_before_collective", 0, world=2))
        assert 1 == two.agents[0].wait(30)

    def test_agents_end_with_the_run(self, two: Launched) -> None:
        """They print nothing, whatever ranks print, and leave nothing behind."""
        two.engine.run(job("say", "hello", world=2))
        two.cluster.end(3)
        assert 3 == two.agents[0].wait(30)
        assert "" == two.agents[0].stdout.read()
        two.close()
        assert gone(two.mark)

    def test_a_driver_that_vanishes_is_noticed(self, two: Launched) -> None:
        """Without Shutdown the agent exits with a failure, and leaves no rank behind."""
        pids = two.engine.run(job("pid", world=2)).ranks[1].value
        two.cluster._agents[0].channel.close()
        assert 1 == two.agents[0].wait(30)
        assert [] == survivors(pids)

    def test_a_terminated_process_leaves_no_rank(self, two: Launched) -> None:
        """SIGTERM, which torchrun sends to all when one has ended, ends the ranks too."""
        pids = two.engine.run(job("pid", world=2)).ranks[1].value
        two.agents[0].terminate()
        assert 143 == two.agents[0].wait(30)
        assert [] == survivors(pids)
