"""Results that are taken later, what ranks print, and what functions leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_conformance.engine import Engine, EngineError, Job, fork_server
from moe_conformance.engine.ledger.entry import MOST_CALLS
from moe_conformance.engine.local_host import LocalHost

JOBS = "self_tests.engine.engine_jobs"


# What runs, and how its ranks end.
FAULTS = (
    pytest.param("one_raises", 0, ["raised", "raised"], id="raises"),
    pytest.param("exit_hard", 1, ["raised", "died"], id="ends"),
    pytest.param("skip_collective", 1, ["hung", "ok"], id="hangs"),
    pytest.param("leave_behind", "variable", ["ok", "ok"], id="leaves-something"),
    pytest.param("reduce_otherwise", 1, ["ok", "ok"], id="disagrees"),
)


def job(function: str, payload: Any = None, world: int = 2, deadline_s: float = 60.0) -> Job:
    """Returns a job of engine_jobs."""
    return Job(f"{JOBS}:{function}", payload, world, {}, deadline_s)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for this file."""
    with Engine(preload=(JOBS,)) as engine:
        yield engine


class LateAsker(LocalHost):
    """Requests a rank's output when the rank has just exited."""

    def _request(self, request: Any) -> None:
        if isinstance(request, fork_server.ReadOutput):
            with contextlib.suppress(ProcessLookupError):  # it may have ended of its own
                os.kill(request.pid, signal.SIGKILL)
            while Path(f"/proc/{request.pid}").exists():
                time.sleep(0.01)
        super()._request(request)


class Overtaken:
    """A cluster of this machine, with a LateAsker."""

    def open(self, preload: Sequence[str], environment: Mapping[str, str]) -> LocalHost:
        """Imports the preload."""
        return LateAsker(preload, environment)


def pids(engine: Engine, world: int = 2) -> list[int]:
    """Returns the pids of a world's ranks."""
    return [rank.value[0] for rank in engine.run(job("pid", world=world)).ranks]


class TestLater:
    def test_a_job_runs_while_the_driver_does_other_work(self, engine: Engine) -> None:
        """Answers in time count, even if the result is taken after the deadline."""
        running = engine.start(job("echo", 7, deadline_s=0.3))
        time.sleep(0.6)
        result = running.result()
        assert (True, [7, 7]) == (result.ok, [rank.value for rank in result.ranks])
        assert result is running.result()

    def test_a_hang_is_told_when_the_driver_asks_late(self, engine: Engine) -> None:
        """A rank without an answer at its deadline is hung, however late the result is taken."""
        running = engine.start(job("spin_before_collective", 0, deadline_s=0.3))
        time.sleep(0.6)
        result = running.result()
        assert ["hung", "hung"] == [rank.status for rank in result.ranks]
        assert (0,) == result.blamed

    @pytest.mark.parametrize("world", [2, 4])
    def test_the_next_job_may_start_before_the_result_is_taken(self, engine: Engine, world: int) -> None:
        """The next job runs at once on the same ranks, or on new ones; every job has its own result."""
        first, second = engine.start(job("echo", 1)), engine.start(job("echo", 2, world))
        assert [2] * world == [rank.value for rank in second.result().ranks]
        assert [1, 1] == [rank.value for rank in first.result().ranks]

    @pytest.mark.parametrize(("function", "payload", "status"), FAULTS)
    def test_the_next_job_does_not_suffer_from_the_one_before(
        self, engine: Engine, function: str, payload: int | str, status: list[str]
    ) -> None:
        """If the ranks are replaced, the next job runs again on the new ones."""
        before = pids(engine)
        first, second = engine.start(job(function, payload, deadline_s=0.5)), engine.start(job("pid"))
        assert status == [rank.status for rank in first.result().ranks]
        after = second.result()
        assert after.ok
        assert set(before).isdisjoint(rank.value[0] for rank in after.ranks)

    def test_what_cannot_run_is_told_by_its_own_result(self, engine: Engine) -> None:
        """A job that cannot be loaded raises when its result is taken, not when the next job starts."""
        first, second = engine.start(job("no_such_function")), engine.start(job("echo", 2))
        with pytest.raises(EngineError, match="no_such_function"):
            first.result()
        assert [2, 2] == [rank.value for rank in second.result().ranks]

    def test_a_dropped_job_has_no_result(self, engine: Engine) -> None:
        """Renewing the ranks drops what runs; the next job has new ranks."""
        before = pids(engine)
        running = engine.start(job("spin_before_collective", 0))
        engine.renew(2)
        with pytest.raises(EngineError, match="has no result: the ranks were renewed before it was taken"):
            running.result()
        assert set(before).isdisjoint(pids(engine))

    def test_worlds_of_different_sizes_run_at_the_same_time(self, engine: Engine, tmp_path: Path) -> None:
        """Ranks of one world wait for ranks of another, whose job starts later."""
        path = str(tmp_path / "made")
        waiting = engine.start(job("wait_for_file", path, 2))
        assert not waiting.ready
        assert engine.run(job("make_file", path, 1)).ok
        assert [path, path] == [rank.value for rank in waiting.result().ranks]
        assert waiting.ready

    @pytest.mark.parametrize(("function", "payload", "status"), FAULTS)
    def test_a_job_of_another_size_does_not_suffer(
        self, engine: Engine, tmp_path: Path, function: str, payload: int | str, status: list[str]
    ) -> None:
        """Replacing the ranks of one world does not affect another world's job."""
        path = str(tmp_path / "made")
        before = pids(engine, 1)
        waiting = engine.start(job("wait_for_file", path, 1))
        assert status == [rank.status for rank in engine.run(job(function, payload, deadline_s=0.5)).ranks]
        engine.renew(2)
        assert engine.run(job("make_file", path, 2)).ok
        assert [path] == [rank.value for rank in waiting.result().ranks]
        assert before == pids(engine, 1)

    def test_a_group_is_there_when_all_ranks_have_made_it(self, engine: Engine) -> None:
        """Ranks outside of a group wait for it too, since a rank that continues may exit."""
        ranks = engine.run(job("make_a_group", world=3)).ranks
        assert ["ok"] * 3 == [rank.status for rank in ranks]
        assert max(rank.value[0] for rank in ranks) < min(rank.value[1] for rank in ranks)

    def test_worlds_of_every_size_stay_up_together(self, engine: Engine) -> None:
        """Changing between world sizes restarts no rank."""
        sizes = (1, 2, 4, 8)
        first = {world: pids(engine, world) for world in sizes}
        assert sum(sizes) == len({pid for world in first.values() for pid in world})
        assert first == {world: pids(engine, world) for world in reversed(sizes)}


class TestPrinting:
    def test_a_failure_tells_what_was_printed(self, engine: Engine) -> None:
        """The result of a failing job holds its output, with that of its child processes."""
        ranks = engine.run(job("print_then_fail", 2)).ranks
        expected = [f"rank {rank} line 0\nrank {rank} line 1\nfrom a child\n" for rank in (0, 1)]
        assert expected == [rank.output for rank in ranks]

    def test_a_rank_that_ends_while_it_is_asked_has_told_already(self) -> None:
        """Its output arrives with the report of its exit."""
        with Engine(preload=(JOBS,), cluster=Overtaken()) as engine:
            (rank,) = engine.run(job("print_then_fail", 1, world=1)).ranks
            assert ("raised", "rank 0 line 0\nfrom a child\n") == (rank.status, rank.output)

    def test_much_output_is_cut_at_its_beginning(self, engine: Engine) -> None:
        """Only the last 64 KiB are kept."""
        output = engine.run(job("print_then_fail", 20_000, world=1)).ranks[0].output
        assert 1 << 16 == len(output)
        assert output.endswith("rank 0 line 19999\nfrom a child\n")

    def test_a_rank_that_prints_without_end_hangs_alone(self, engine: Engine) -> None:
        """It is blamed at the deadline, and the next job runs."""
        result = engine.run(job("print_without_end", deadline_s=0.7))
        assert (["ok", "hung"], (1,)) == ([rank.status for rank in result.ranks], result.blamed)
        assert 1 << 16 >= len(result.ranks[1].output) > 0
        assert engine.run(job("echo", 1)).ok


class TestEndlessCalls:
    def test_the_ledger_of_a_rank_that_calls_for_ever_is_bounded(self, engine: Engine) -> None:
        """It holds the first calls; the rank hangs, and the next job runs."""
        result = engine.run(job("call_for_ever", deadline_s=4.0))
        assert ["ok", "hung"] == [rank.status for rank in result.ranks]
        assert MOST_CALLS >= len(result.ranks[1].ledger) > 100
        assert engine.run(job("echo", 1)).ok


class TestLeftovers:
    @pytest.mark.parametrize(
        ("what", "told"),
        [
            ("thread", "thread 'watcher'"),
            ("variable", "environment variable 'DEBUG'"),
            ("dtype", "the default dtype"),
            ("folder", "the working directory"),
            ("removed folder", "the working directory"),
            ("mode", "the grad mode"),
        ],
    )
    def test_what_a_function_leaves_is_told_and_gone(self, engine: Engine, what: str, told: str) -> None:
        """The job is ok, the rank and its leftover are reported, and the next job has other ranks."""
        before = pids(engine)
        result = engine.run(job("leave_behind", what))
        assert (True, [(), (told,)]) == (result.ok, [rank.left for rank in result.ranks])
        assert set(before).isdisjoint(pids(engine))

    def test_a_forked_child_gives_no_answer(self, engine: Engine) -> None:
        """A function that forks and returns twice has one result; the child's is dropped."""
        for _ in range(5):
            values = [rank.value for rank in engine.run(job("fork_and_return")).ranks]
            assert ["parent", "parent"] == values

    def test_groups_left_behind_are_told(self, engine: Engine) -> None:
        """Process groups that the function made and did not destroy are reported; the engine's are not."""
        groups = {"all": ((0, 1),), "each": ((0,), (1,))}
        assert [(), ()] == [rank.left for rank in engine.run(Job(f"{JOBS}:echo", 1, 2, groups)).ranks]
        assert [("2 process groups",)] * 2 == [rank.left for rank in engine.run(job("leave_groups")).ranks]

    def test_what_is_kept_on_purpose_is_no_leftover(self, engine: Engine) -> None:
        """A job that adds to `kept` may change its process; later jobs are compared with that."""
        kept = engine.run(job("keep"))
        before = pids(engine)
        assert [(), ()] == [rank.left for rank in kept.ranks]
        assert before == pids(engine)
        assert [(), ("environment variable 'DEBUG'",)] == [
            r.left for r in engine.run(job("leave_behind", "variable")).ranks
        ]
