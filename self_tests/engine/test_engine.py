"""The engine runs functions on ranks, blames the right ranks for faults, and works afterwards."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_conformance.engine import Engine, EngineError, Job, JobResult, job_wait
from self_tests.engine import engine_jobs
from self_tests.engine.engine_jobs import BreaksWhileLoading
from self_tests.engine.test_life import survivors
from self_tests.engine.test_wire import DTYPES, bits, sample

JOBS = "self_tests.engine.engine_jobs"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for this file, so that every test also shows that it survived the tests before."""
    with Engine(preload=(JOBS,)) as engine:
        yield engine


@pytest.fixture
def run(engine: Engine) -> Callable[..., JobResult]:
    """Runs a function of engine_jobs, on two ranks by default."""

    def run(
        function: str, payload: Any = None, world: int = 2, groups: Any = None, deadline_s: float = 60.0
    ) -> JobResult:
        return engine.run(Job(f"{JOBS}:{function}", payload, world, groups or {}, deadline_s))

    return run


@pytest.fixture
def works_again(run: Callable[..., JobResult]) -> Iterator[None]:
    """Asserts, after the test, that the same world still computes right results."""
    yield
    for world in (2, 4):
        ranks = run("sums", world=world).ranks
        assert [("ok", {"world": world * (world + 1) / 2})] * world == [(r.status, r.value) for r in ranks]


def statuses(result: JobResult) -> list[tuple[str, bool]]:
    """Returns (status, secondary) per rank."""
    return [(rank.status, rank.secondary) for rank in result.ranks]


class TestValues:
    def test_ranks_have_the_variables_of_torchrun(self, run: Callable[..., JobResult]) -> None:
        """Ranks have torchrun's environment variables; the driver's own values are not inherited."""
        for name, values in {"RANK": ["0", "1"], "LOCAL_RANK": ["0", "1"], "WORLD_SIZE": ["2", "2"]}.items():
            assert values == [rank.value for rank in run("variable", name).ranks]
        assert ["127.0.0.1"] * 2 == [rank.value for rank in run("variable", "MASTER_ADDR").ranks]

    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_ranks_know_where_they_are(self, run: Callable[..., JobResult], world: int) -> None:
        """Rank, world, default group and device are right on every rank."""
        result = run("where_am_i", world=world)
        expected: list[Any] = [(rank, world, (rank, world), "cpu", {}) for rank in range(world)]
        assert (True, ()) == (result.ok, result.blamed)
        assert expected == [rank.value for rank in result.ranks]
        assert list(range(world)) == [rank.rank for rank in result.ranks]

    def test_a_rank_gets_its_group_of_every_partition(self, run: Callable[..., JobResult]) -> None:
        """Groups are the named ones, absent where a rank is in none."""
        groups = {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3)), "odd": ((1, 3),), "single": ((2,),)}
        expected = [
            {"rows": [0, 1], "columns": [0, 2]},
            {"rows": [0, 1], "columns": [1, 3], "odd": [1, 3]},
            {"rows": [2, 3], "columns": [0, 2], "single": [2]},
            {"rows": [2, 3], "columns": [1, 3], "odd": [1, 3]},
        ]
        assert expected == [rank.value[-1] for rank in run("where_am_i", world=4, groups=groups).ranks]

    def test_groups_communicate(self, run: Callable[..., JobResult]) -> None:
        """A collective on a group reaches the ranks of the group."""
        groups = {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3))}
        expected = [
            {"world": 10.0, "rows": 3.0, "columns": 4.0},
            {"world": 10.0, "rows": 3.0, "columns": 6.0},
            {"world": 10.0, "rows": 7.0, "columns": 4.0},
            {"world": 10.0, "rows": 7.0, "columns": 6.0},
        ]
        assert expected == [rank.value for rank in run("sums", world=4, groups=groups).ranks]

    def test_groups_are_kept_for_later_jobs(self, run: Callable[..., JobResult]) -> None:
        """A group that is named again is the same object, whatever other groups the job has."""
        first = {"kept": ((0, 1),)}
        run("same_groups_as_before", groups=first)
        again = {"new": ((0,), (1,)), **first}
        assert [False, False] == [rank.value for rank in run("same_groups_as_before", groups=again).ranks]
        assert [True, True] == [rank.value for rank in run("same_groups_as_before", groups=again).ranks]

    def test_members_make_groups_of_their_own(self, run: Callable[..., JobResult]) -> None:
        """Ranks that are in unequally many groups agree on the name of a group that they alone make, and make again."""
        for groups in ({}, {"one": ((0,),), "two": ((0, 1),)}, {"one": ((3,),), "three": ((1, 2, 3),)}):
            for _ in range(3):
                result = run("sum_in_own_group", world=4, groups=groups, deadline_s=20.0)
                assert [3.0, 0.0, 0.0, 3.0] == [rank.value for rank in result.ranks]

    def test_processes_stay_for_the_next_job(self, run: Callable[..., JobResult]) -> None:
        """The same processes run job after job, also if another world works in between."""
        before = [rank.value for rank in run("pid").ranks]
        others = [rank.value for rank in run("pid", world=4).ranks]
        assert before == [rank.value for rank in run("pid").ranks]
        assert 6 == len({pid for pid, _ in before + others} - {os.getpid()})

    def test_tensors_of_every_dtype_go_there_and_back(self, run: Callable[..., JobResult]) -> None:
        """Payload and value keep the bits of tensors of every dtype."""
        payload = {dtype: sample(dtype) for dtype in DTYPES} | {"none": torch.ones(0, 2), "zero_d": torch.tensor(5)}
        expected = [(tensor.dtype, tensor.shape, bits(tensor)) for tensor in payload.values()]
        for rank in run("echo", payload).ranks:
            assert list(payload) == list(rank.value)
            assert expected == [(tensor.dtype, tensor.shape, bits(tensor)) for tensor in rank.value.values()]

    def test_large_values_go_there_and_back(self, run: Callable[..., JobResult]) -> None:
        """Values far larger than a socket's buffer arrive from all ranks."""
        payload = torch.randn(2_000_000)
        assert [True, True] == [torch.equal(payload, rank.value) for rank in run("echo", payload).ranks]

    def test_rank_processes_are_set_up_as_promised(self, run: Callable[..., JobResult]) -> None:
        """A rank has one compute thread, ignores SIGINT, has the driver's sys.path and a raised OOM score."""
        with open("/proc/self/oom_score_adj", encoding="ascii") as oom:
            ours = int(oom.read())
        for threads, deaf, path, oom_score, policy in (rank.value for rank in run("settings").ranks):
            assert policy == os.SCHED_BATCH  # else gloo spins where ranks share processors
            assert (1, True) == (threads, deaf)
            assert {entry or os.getcwd() for entry in sys.path} <= set(path)
            assert oom_score == max(ours, 800)

    def test_work_that_takes_a_while_is_not_taken_for_a_deadlock(self, run: Callable[..., JobResult]) -> None:
        """Ranks that wait for a large collective are not reported as deadlocked."""
        assert [12.0, 12.0] == [rank.value for rank in run("reduce_megabytes", 48).ranks]


@pytest.mark.usefixtures("works_again")
class TestExceptions:
    def test_one_exception_is_blamed_on_its_rank(self, run: Callable[..., JobResult]) -> None:
        """The peers' lost connections are secondary."""
        result = run("one_raises", 2, world=4)
        assert (False, (2,)) == (result.ok, result.blamed)
        assert [("raised", True), ("raised", True), ("raised", False), ("raised", True)] == statuses(result)
        faulty = result.ranks[2]
        assert ("ValueError: rank 2 has", "ValueError") == (faulty.error, faulty.error_type)
        assert "raise ValueError" in faulty.traceback
        assert "moe_conformance/engine" not in faulty.traceback

    def test_a_wrapped_lost_connection_is_secondary(self, run: Callable[..., JobResult]) -> None:
        """An exception raised because of a lost connection counts as one."""
        result = run("one_raises_and_others_wrap", 0)
        assert (0,) == result.blamed
        assert [("raised", False), ("raised", True)] == statuses(result)
        assert f"{JOBS}.RefusedError" == result.ranks[1].error_type

    def test_peers_that_lose_the_culprit_before_their_function_is_called_are_secondary(
        self, run: Callable[..., JobResult]
    ) -> None:
        """The faulty rank may have exited while others still make groups; that raises no EngineError."""
        result = run("echo", BreaksWhileLoading(faulty=1))
        assert [("raised", True), ("died", False)] == statuses(result)

    def test_peers_that_need_not_wait_finish(self, run: Callable[..., JobResult]) -> None:
        """A rank's exception does not keep the other ranks from returning."""
        result = run("one_raises_others_work", 1)
        assert [("ok", False), ("raised", False)] == statuses(result)
        assert "done" == result.ranks[0].value

    def test_an_exception_on_all_ranks_is_blamed_on_all(self, run: Callable[..., JobResult]) -> None:
        """Every rank's own exception is reported, with its class and plain attributes."""
        result = run("all_raise")
        assert (0, 1) == result.blamed
        for rank in result.ranks:
            assert f"RefusedError: no such thing on rank {rank.rank}" == rank.error
            assert (f"{JOBS}.RefusedError", {"by": "library", "count": 3}) == (
                rank.error_type,
                rank.error_attributes,
            )

    def test_sys_exit_is_an_exception(self, run: Callable[..., JobResult]) -> None:
        """A function that calls sys.exit is reported as having raised SystemExit."""
        result = run("leave", 0)
        assert ("SystemExit: 3", (0,)) == (result.ranks[0].error, result.blamed)

    def test_destroying_the_default_group_is_blamed_on_the_job_that_did(self, run: Callable[..., JobResult]) -> None:
        """The job that destroys the default group is blamed, and not the next one."""
        result = run("destroy_the_default_group", 0)
        assert [("raised", False), ("ok", False)] == statuses(result)
        assert "destroyed the default process group" in result.ranks[0].error

    def test_a_result_that_cannot_be_sent_is_told_in_words(self, run: Callable[..., JobResult]) -> None:
        """A rank whose result cannot be pickled is reported as raised; the other rank's value arrives."""
        result = run("return_a_generator", 1)
        assert [("ok", False), ("raised", False)] == statuses(result)
        assert "fine" == result.ranks[0].value
        assert "the function's result, a generator, cannot be sent" in result.ranks[1].error


@pytest.mark.usefixtures("works_again")
class TestDeaths:
    def test_a_hard_exit_is_blamed_on_its_rank(self, run: Callable[..., JobResult]) -> None:
        """A process that exits is detected at once and reported with its exit code."""
        result = run("exit_hard", 1, world=4)
        assert [("raised", True), ("died", False), ("raised", True), ("raised", True)] == statuses(result)
        assert "exited with code 7 before it answered" == result.ranks[1].error

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT], ids=lambda n: n.name)
    def test_a_death_by_signal_is_blamed_on_its_rank(
        self, run: Callable[..., JobResult], number: signal.Signals
    ) -> None:
        """The signal is named; for a crash there is a Python stack."""
        result = run("kill_oneself", (0, int(number)))
        assert [("died", False), ("raised", True)] == statuses(result)
        assert f"killed by {number.name}" == result.ranks[0].error
        stack = result.ranks[0].traceback or ""
        assert (number != signal.SIGKILL) == ("in kill_oneself" in stack)

    def test_a_death_between_jobs_is_survived(self, run: Callable[..., JobResult]) -> None:
        """A world of which a rank has exited is replaced before the next job, even if that is sent at once."""
        pid, _ = run("pid").ranks[0].value
        os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(0.0002)  # at once: the news that it has ended takes longer
        assert ["again", "again"] == [rank.value for rank in run("echo", "again").ranks]

    def test_the_death_of_the_forking_process_is_survived(self, run: Callable[..., JobResult]) -> None:
        """Losing the fork server raises an EngineError, and the next job has another one."""
        pids = [rank.value[0] for rank in run("pid").ranks]
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            run("kill_the_parent")
        assert [] == survivors(pids)


@pytest.mark.usefixtures("works_again")
class TestHangs:
    @pytest.mark.parametrize("function", ["sleep_before_collective", "spin_before_collective"])
    def test_a_hang_outside_of_collectives_is_blamed_on_its_rank(
        self, run: Callable[..., JobResult], function: str
    ) -> None:
        """Ranks that wait for it in a collective are secondary; the stack shows where it hangs."""
        result = run(function, 1, world=4, deadline_s=2.0)
        assert (1,) == result.blamed
        assert [("hung", True), ("hung", False), ("hung", True), ("hung", True)] == statuses(result)
        assert result.ranks[1].error.startswith(f"no answer within 2.0 s: in {function}, from ")
        assert f"in {function}\n" in result.ranks[1].traceback

    def test_a_long_wait_is_told_while_it_lasts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`notice` is called once, with the rank, file, line and function that the driver waits for."""
        monkeypatch.setattr(job_wait, "_NOTICE_S", 0.2)
        told: list[str] = []
        with Engine(preload=(JOBS,), notice=told.append) as engine:
            engine.run(Job(f"{JOBS}:sleep_before_collective", 1, 2, {}, 2.0))
        (sentence,) = told
        file = re.escape(engine_jobs.__file__)
        assert re.fullmatch(
            rf"waiting for rank 0 in {file}:\d+ \(\w+\); rank 1 in {file}:\d+ \(sleep_before_collective\), "
            r"after 0 s of 2 s",
            sentence,
        )

    def test_a_stopped_process_is_blamed_on_its_rank(self, run: Callable[..., JobResult]) -> None:
        """A stopped rank is reported as hung; it is resumed only to dump its stack."""
        result = run("stop_oneself", 0, deadline_s=2.0)
        assert [("hung", False), ("hung", True)] == statuses(result)
        assert result.ranks[0].error.startswith("no answer within 2.0 s: stopped by a signal in ")
        assert "in stop_oneself\n" in result.ranks[0].traceback

    def test_a_sleeping_thread_is_no_deadlock(self, run: Callable[..., JobResult]) -> None:
        """A rank that waits for one of its threads could continue at any time: only the deadline ends it."""
        result = run("sleep_on_a_thread", deadline_s=2.0)
        assert (0,) == result.blamed
        assert "no answer within 2.0 s" in result.ranks[0].error

    @pytest.mark.parametrize("function", ["skip_collective", "skip_collective_in_backward"])
    def test_a_skipped_collective_is_blamed_on_who_returned(self, run: Callable[..., JobResult], function: str) -> None:
        """The deadlock is proved long before the deadline; the rank that returned is blamed."""
        result = run(function, 1, deadline_s=60.0)
        assert [("hung", True), ("ok", False)] == statuses(result)
        assert (False, (1,)) == (result.ok, result.blamed)
        assert result.ranks[1].error.startswith("returned while rank 0 waited in a collective: on group (0, 1) call ")
        assert "waits in a collective that cannot complete: in all_reduce" in result.ranks[0].error
        assert "in _all_reduce\n" in result.ranks[0].traceback
        assert result.seconds < 30.0

    def test_a_circle_of_waiting_ranks_is_blamed_on_all(self, run: Callable[..., JobResult]) -> None:
        """If no rank can be singled out, all ranks that failed are blamed."""
        result = run("wait_for_each_other", deadline_s=60.0)
        assert [("hung", False), ("hung", False)] == statuses(result)
        assert result.seconds < 30.0

    def test_a_late_answer_is_never_taken_for_a_later_one(self, run: Callable[..., JobResult]) -> None:
        """An answer after the deadline is dropped; the next job gets its own answers."""
        result = run("sleep", 0.6, deadline_s=0.5)
        assert [("hung", False), ("hung", False)] == statuses(result)
        for expected in ("first", "second"):
            assert [expected] * 2 == [rank.value for rank in run("echo", expected).ranks]
            time.sleep(0.1)

    def test_ctrl_c_leaves_a_working_engine(self, run: Callable[..., JobResult]) -> None:
        """An interrupted job is given up with its ranks."""

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                run("sleep", 600.0)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert ["next", "next"] == [rank.value for rank in run("echo", "next").ranks]


class TestMisuse:
    @pytest.mark.parametrize(
        ("job", "sentence"),
        [
            (Job("no_colon", None, 2, {}), "'no_colon' is not of the form"),
            (Job(f"{JOBS}:echo", None, 0, {}), "at least one rank, not 0"),
            (Job(f"{JOBS}:echo", None, 2, {}, deadline_s=0.0), "positive number of seconds, not 0.0"),
            (Job(f"{JOBS}:echo", None, 2, {"a": ((1, 0),)}), r"groups\['a'\]: \(1, 0\) is not an ascending"),
            (Job(f"{JOBS}:echo", None, 2, {"a": ((0, 2),)}), r"\(0, 2\) names a rank outside 0..1"),
            (Job(f"{JOBS}:echo", None, 2, {"a": ((2,),)}), r"\(2,\) names a rank outside 0..1"),
            (Job(f"{JOBS}:echo", None, 2, {"a": ((-1, 0),)}), r"\(-1, 0\) names a rank outside 0..1"),
            (Job(f"{JOBS}:echo", None, 2, {"a": ((),)}), r"\(\) is not an ascending"),
            (Job(f"{JOBS}:echo", None, 4, {"a": ((0, 1), (1, 2))}), r"ranks \[1\] are in two groups"),
            (Job(f"{JOBS}:echo", lambda: 1, 2, {}), "the payload of .* cannot be pickled"),
            (Job("no_such_module:echo", None, 2, {}), "cannot run no_such_module:echo: ModuleNotFoundError"),
            (Job(f"{JOBS}:no_such_function", None, 2, {}), "cannot run .*AttributeError"),
        ],
        ids=lambda value: value.replace("\\", "") if isinstance(value, str) else "",
    )
    def test_a_job_that_cannot_run_is_an_error_in_words(
        self, engine: Engine, run: Callable[..., JobResult], job: Job, sentence: str
    ) -> None:
        """A malformed job raises, names what is wrong, and leaves the engine usable."""
        with pytest.raises(EngineError, match=sentence):
            engine.run(job)
        assert ["next", "next"] == [rank.value for rank in run("echo", "next").ranks]

    def test_an_unknown_device_is_an_error_in_words(self) -> None:
        """Only "cpu", and "cuda" where there is a GPU, are accepted as devices."""
        with pytest.raises(EngineError, match="must be 'cpu' or 'cuda', not 'tpu'"):
            Engine(device="tpu")
