"""Jobs that are sent together have the results that they would have alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from moe_conformance.engine import Engine, EngineError, Job, JobResult

JOBS = "self_tests.engine.engine_jobs"


def job(function: str, payload: Any = None, world: int = 2, **fields: Any) -> Job:
    """Returns a job of engine_jobs."""
    return Job(f"{JOBS}:{function}", payload, world, {}, **fields)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for this file."""
    with Engine(preload=(JOBS,)) as engine:
        yield engine


def run(engine: Engine, *jobs: Job) -> list[JobResult]:
    """Returns the results of jobs that are sent together."""
    return [running.result() for running in engine.start_many(jobs)]


def words(result: JobResult) -> list[tuple[object, ...]]:
    """Returns status, secondary, left and the called operators of every rank."""
    return [(rank.status, rank.secondary, rank.left, tuple(e.op for e in rank.ledger)) for rank in result.ranks]


def pids(result: JobResult) -> list[int]:
    """Returns the pids that a job `pid` returned."""
    return [rank.value[0] for rank in result.ranks]


FAULTS = (
    pytest.param(job("one_raises", 1), id="raises"),
    pytest.param(job("exit_hard", 1), id="ends"),
    pytest.param(job("skip_collective", 1), id="hangs-in-a-collective"),
    pytest.param(job("sleep_before_collective", 1, deadline_s=1.0), id="hangs-until-its-deadline"),
    pytest.param(job("leave_behind", "variable"), id="leaves-something"),
    pytest.param(job("reduce_otherwise", 1), id="disagrees"),
    pytest.param(job("return_a_generator", 1), id="returns-what-cannot-be-sent"),
)


class TestWithoutAFault:
    def test_every_job_has_its_value_its_group_and_its_ledger(self, engine: Engine) -> None:
        """Values, groups and ledgers are those of each job; all ran in the same processes."""
        rows = replace(job("sums", world=4), groups={"rows": ((0, 1), (2, 3))})
        echo, sums, again, pid = run(engine, job("echo", 7, 4), rows, job("sums", world=4), job("pid", world=4))
        assert [7] * 4 == [rank.value for rank in echo.ranks]
        assert [{"world": 10.0, "rows": row} for row in (3.0, 3.0, 7.0, 7.0)] == [rank.value for rank in sums.ranks]
        assert [{"world": 10.0}] * 4 == [rank.value for rank in again.ranks]
        assert [0, 2, 1, 0] == [len(result.ranks[3].ledger) for result in (echo, sums, again, pid)]
        assert [0, 1] == [entry.order for entry in sums.ranks[3].ledger]
        assert pids(pid) == pids(engine.run(job("pid", world=4)))

    def test_a_rank_is_sent_its_rank_payload(self, engine: Engine) -> None:
        """`context.rank_payload` is the rank's value of `Job.rank_payloads`; None where the job has none."""
        both = replace(job("own", "both"), rank_payloads=("a", "b"))
        first, second = run(engine, both, job("own", "none"))
        assert [("both", "a"), ("both", "b")] == [rank.value for rank in first.ranks]
        assert [("none", None)] * 2 == [rank.value for rank in second.ranks]

    def test_each_is_listened_to_in_its_own_way(self, engine: Engine) -> None:
        """The asynchrony mode of a job does not apply to the next one."""
        poisoned = replace(job("peek_before_the_wait"), asynchrony="poisoned")
        values = [[rank.value for rank in result.ranks] for result in run(engine, poisoned, job("sums"), poisoned)]
        assert [[True, True], [{"world": 3.0}] * 2, [True, True]] == values

    def test_the_next_ones_run_while_these_are_read(self, engine: Engine) -> None:
        """Jobs may be sent before the previous results are taken."""
        first = engine.start_many([job("echo", number) for number in range(3)])
        second = engine.start_many([job("echo", number) for number in range(3, 6)])
        assert list(range(6)) == [running.result().ranks[1].value for running in (*first, *second)]


class TestAFaultInTheMiddle:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_it_is_that_of_its_job_alone(self, engine: Engine, fault: Job) -> None:
        """All results, blamed ranks and leftovers are what they are alone."""
        jobs = (job("sums"), fault, job("sums"), job("echo", 3))
        alone = [engine.run(one) for one in jobs]
        together = run(engine, *jobs)
        assert [result.blamed for result in alone] == [result.blamed for result in together]
        assert list(map(words, alone)) == list(map(words, together))
        assert [True, True, True] == [together[place].ok for place in (0, 2, 3)]
        assert not together[1].ok or any(rank.left for rank in together[1].ranks)

    def test_jobs_that_ran_ahead_keep_their_results(self, engine: Engine) -> None:
        """Jobs that were sent after a batch with a fault have their results."""
        faulty = engine.start_many([job("echo", 1), job("one_raises", 0), job("echo", 2)])
        behind = engine.start_many([job("echo", 3), job("one_raises", 1)])
        last = engine.start_many([job("echo", 4)])
        results = [running.result() for running in (*faulty, *behind, *last)]
        assert [(), (0,), (), (), (1,), ()] == [result.blamed for result in results]
        assert [1, 2, 3, 4] == [result.ranks[0].value for result in results if result.ok]

    def test_each_has_its_own_deadline(self, engine: Engine) -> None:
        """Jobs that are too slow only together are not hung; one that hangs has its own deadline."""
        slow = [job("sleep", 0.4, deadline_s=0.9) for _ in range(3)]
        began = time.monotonic()
        hung = job("sleep_before_collective", 0, deadline_s=1.5)
        results = run(engine, *slow, hung)
        assert [True, True, True, False] == [result.ok for result in results]
        assert "no answer within 1.5 s" in results[3].ranks[0].error
        assert time.monotonic() - began < 60

    def test_one_that_cannot_be_loaded_is_told_alone(self, engine: Engine) -> None:
        """A function that does not exist is the error of its job only."""
        first, missing, last = engine.start_many([job("echo", 1), job("no_such_function"), job("echo", 2)])
        assert first.result().ok
        with pytest.raises(EngineError, match="no_such_function"):
            missing.result()
        assert last.result().ok

    def test_a_child_of_a_function_does_not_go_on(self, engine: Engine) -> None:
        """The child of a function that forks does not run the following jobs."""
        results = run(engine, job("fork_and_return"), job("sums"))
        assert [{"world": 3.0}] * 2 == [rank.value for rank in results[1].ranks]


class TestUse:
    def test_jobs_of_two_worlds_are_refused(self, engine: Engine) -> None:
        """All jobs of a message must have the same world."""
        with pytest.raises(EngineError, match="must have the same number of ranks"):
            engine.start_many([job("echo", 1), job("echo", 1, 4)])

    def test_own_values_must_be_one_for_each_rank(self, engine: Engine) -> None:
        """One rank payload for two ranks is refused."""
        with pytest.raises(EngineError, match="`rank_payloads` has 1 values for 2 ranks"):
            engine.start(replace(job("echo"), rank_payloads=(1,)))

    def test_ranks_that_are_renewed_drop_what_runs(self, engine: Engine) -> None:
        """Renewing the ranks drops all jobs that run."""
        running = engine.start_many([job("echo", 1), job("echo", 2)])
        engine.renew(2)
        for each in running:
            with pytest.raises(EngineError, match="the ranks were renewed before it was taken"):
                each.result()

    def test_finished_jobs_outlive_their_ranks(self, engine: Engine) -> None:
        """Finished results are available after the ranks are renewed, also of jobs that must run again alone."""
        running = engine.start_many([job("echo", 1), job("one_raises", 1), job("echo", 2)])
        assert running[0].result().ok
        for each in running:
            each.finish()
        engine.renew(2)
        assert [(), (1,), ()] == [each.result().blamed for each in running]

    def test_virtual_ranks_run_them_one_by_one(self) -> None:
        """On virtual ranks the results are the same."""
        with Engine(virtual=True, preload=(JOBS,)) as engine:
            jobs = (replace(job("own", 1, 3), rank_payloads=(4, 5, 6)), job("one_raises", 2, 3), job("own", 2, 3))
            results = run(engine, *jobs)
        assert [(), (2,), ()] == [result.blamed for result in results]
        assert [(1, 4), (1, 5), (1, 6)] == [rank.value for rank in results[0].ranks]
