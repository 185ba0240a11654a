"""Decisions of the engine that need no ranks: blame, transport, the meaning of stacks, idle threads."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from moe_conformance.engine import EngineError, RankResult, faults, processes, stacks
from moe_conformance.engine.blame import Finding, assign
from moe_conformance.engine.deadlock import IdlePeriod
from moe_conformance.engine.hosts import Placement
from moe_conformance.engine.local_host import describe_exit
from moe_conformance.engine.transport import assign as assign_devices
from moe_conformance.engine.transport import visible_gpus

KINDS = {
    "ok": lambda rank: Finding(RankResult(rank, "ok")),
    "raised": lambda rank: Finding(RankResult(rank, "raised", error="ValueError")),
    "lost": lambda rank: Finding(RankResult(rank, "raised", error="closed"), connection_lost=True),
    "died": lambda rank: Finding(RankResult(rank, "died", error="killed")),
    "hung": lambda rank: Finding(RankResult(rank, "hung", error="no answer")),
    "waits": lambda rank: Finding(RankResult(rank, "hung", error="no answer"), waits=True),
}


class TestBlame:
    @pytest.mark.parametrize(
        ("ranks", "blamed"),
        [
            ("ok ok", ()),
            ("raised raised", (0, 1)),
            ("raised lost waits ok", (0,)),
            ("lost died", (1,)),
            ("waits hung", (1,)),
            ("raised hung waits", (0, 1)),
            ("waits ok", (1,)),
            ("waits ok lost", (1,)),
            ("waits waits", (0, 1)),
            ("lost lost", (0, 1)),
            ("lost ok", (0,)),
        ],
    )
    def test_blame_falls_on_those_who_explain_the_others(self, ranks: str, blamed: tuple[int, ...]) -> None:
        """Ranks that raised, died or hang alone are blamed first, then those that returned early, then all."""
        results = assign([KINDS[kind](rank) for rank, kind in enumerate(ranks.split())])
        assert blamed == tuple(r.rank for r in results if r.error is not None and not r.secondary)

    def test_who_returned_early_is_told_who_waited(self) -> None:
        """The message names all waiting ranks."""
        results = assign([KINDS[kind](rank) for rank, kind in enumerate(("waits", "ok", "waits"))])
        assert "returned while ranks 0, 2 waited in a collective" == results[1].error


def placements(*gpus_per_machine: int, ranks: int) -> list[Placement]:
    """Returns the placements of `ranks` ranks on each machine."""
    found = []
    for machine, gpus in enumerate(gpus_per_machine):
        names = tuple(f"machine {machine}/{gpu}" for gpu in range(gpus))
        found += [Placement(local, names) for local in range(ranks)]
    return found


class TestTransport:
    @pytest.mark.parametrize(
        ("device", "ranks", "gpus", "transport"),
        [
            ("cpu", 4, (0,), "gloo"),
            ("cpu", 2, (8,), "gloo"),
            ("cuda", 1, (1,), "cpu:gloo,cuda:nccl"),
            ("cuda", 8, (8,), "cpu:gloo,cuda:nccl"),
            ("cuda", 2, (1,), "gloo"),
            ("cuda", 16, (8,), "gloo"),
            ("cuda", 4, (4, 4), "cpu:gloo,cuda:nccl"),
            ("cuda", 4, (4, 2), "gloo"),
        ],
    )
    def test_nccl_only_where_each_rank_has_a_gpu(
        self, device: str, ranks: int, gpus: tuple[int, ...], transport: str
    ) -> None:
        """NCCL refuses two ranks on one GPU, on whichever machine."""
        assert transport == assign_devices(device, placements(*gpus, ranks=ranks))[1]

    def test_ranks_of_a_machine_share_its_gpus_in_turn(self) -> None:
        """The number on the machine counts, not the rank."""
        assert ["cuda:0", "cuda:1", "cuda:0"] == assign_devices("cuda", placements(2, ranks=3))[0]
        assert ["cuda:0", "cuda:1"] * 2 == assign_devices("cuda", placements(4, 4, ranks=2))[0]
        assert ["cpu"] * 3 == assign_devices("cpu", placements(2, ranks=3))[0]

    def test_processes_that_see_one_gpu_each_take_it(self) -> None:
        """Where a batch system hides the other GPUs, every rank's device is its first."""
        own = [Placement(local, (f"machine/{local}",)) for local in range(2)]
        assert (["cuda:0", "cuda:0"], "cpu:gloo,cuda:nccl") == assign_devices("cuda", own)
        same = [Placement(local, ("machine/0",)) for local in range(2)]
        assert (["cuda:0", "cuda:0"], "gloo") == assign_devices("cuda", same)

    def test_a_machine_without_a_gpu_is_told(self) -> None:
        """The message names the first rank that would have no device."""
        with pytest.raises(EngineError, match="rank 2 would see no GPU"):
            assign_devices("cuda", placements(2, 0, ranks=2))

    def test_gpus_of_a_machine_are_named_as_their_process_sees_them(self) -> None:
        """A slice of the machine's GPUs keeps their names and its own order."""
        assert [2, 0] == [int(name.rpartition("/")[2]) for name in visible_gpus("2,0")]
        assert () == visible_gpus("")


def dumped(*frames: str, thread: str = "Current thread") -> str:
    """Returns what faulthandler writes for one thread, innermost frame first."""
    head = f"{thread} 0x00007f0000000000 (most recent call first):"
    return "\n".join([head, *(f'  File "{f.split()[0]}", line {f.split()[1]} in {f.split()[2]}' for f in frames)])


C10D = "/x/torch/distributed/distributed_c10d.py 3000 all_reduce"
BACKWARD = "/x/torch/autograd/graph.py 800 _engine_run_backward"
USER = "/home/me/layer.py 12 forward"


class TestStacks:
    @pytest.mark.parametrize(
        ("text", "waits"),
        [
            (dumped(C10D, USER), True),
            (dumped("/x/torch/_ops.py 1200 __call__", C10D, USER), True),
            (dumped(USER, "/x/torch/distributed/fsdp/_hooks.py 9 hook"), False),
            (dumped(USER), False),
            ("", False),
            (dumped(C10D, thread="Thread") + "\n\n" + dumped(USER), False),
            (dumped(C10D, thread="Thread") + "\n\n" + dumped(BACKWARD, USER), True),
            (dumped(BACKWARD, USER), False),
        ],
        ids=["collective", "operator", "hook of torch", "elsewhere", "empty", "helper", "backward", "computing"],
    )
    def test_the_innermost_telling_frame_decides(self, text: str, waits: bool) -> None:
        """A rank waits in a collective if its main thread, or the backward it waits for, is in torch.distributed."""
        assert waits == stacks.waits_in_collective(text)

    def test_a_wait_without_a_frame_of_torch_is_seen_by_its_line(self, tmp_path: Path) -> None:
        """Waiting on a Work is C++, and is recognised by the caller's source line."""
        source = tmp_path / "layer.py"
        source.write_text("handle = start()\nhandle.wait()\ncompute()\n")
        assert [False, True, False] == [
            stacks.waits_in_collective(dumped(f"{source} {line} forward")) for line in (1, 2, 3)
        ]

    def test_the_place_names_the_call_and_who_made_it(self) -> None:
        """The location names the innermost call, and the innermost frame outside of torch."""
        assert "in all_reduce, from /home/me/layer.py:12" == stacks.location(dumped(C10D, USER))
        assert "it dumped no stack" == stacks.location("")


def read_stats(pids: list[int], main_only: bool) -> dict[int, dict[int, processes.ThreadStats]]:
    """Returns the statistics of the threads of some processes."""
    return {pid: processes.thread_stats(pid, main_only) for pid in pids}


class TestIdlePeriod:
    @pytest.fixture
    def child(self) -> Iterator[Callable[[str], int]]:
        """Starts a Python process and returns its pid once it runs the code."""
        started = []

        def start(code: str) -> int:
            process = subprocess.Popen(
                [sys.executable, "-c", f"print(flush=True)\n{code}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            started.append(process)
            process.stdout.readline()
            time.sleep(0.2)
            return process.pid

        yield start
        for process in started:
            process.kill()
            process.communicate()

    def test_only_processes_that_do_not_run_are_still(self, child: Callable[[str], int]) -> None:
        """A process that waits is idle; together with one that computes, on whichever thread, it is not."""
        waits = child("input()")
        computes = child("import threading\nthreading.Thread(target=lambda: [n for n in iter(int, 1)]).start()")
        still, moving = (IdlePeriod(partial(read_stats, pids)) for pids in ([waits], [waits, computes]))
        time.sleep(0.3)
        assert (True, False) == (still.is_idle(), moving.is_idle())

    def test_it_is_still_for_as_long_as_it_was_watched(self, child: Callable[[str], int]) -> None:
        """An idle period begins with its construction."""
        still = IdlePeriod(partial(read_stats, [child("input()")]))
        time.sleep(0.1)
        assert (True, True, False) == (still.is_idle(), still.lasted(0.1), still.lasted(60.0))

    @pytest.mark.parametrize(
        ("helper", "lasts"),
        [
            (processes.ThreadStats(ran_ns=0, waited_ns=0, count=3, ready=False), True),
            (processes.ThreadStats(ran_ns=0, waited_ns=10**7, count=3, ready=True), False),
            (processes.ThreadStats(ran_ns=0, waited_ns=0, count=0, ready=True), False),
            (processes.ThreadStats(ran_ns=0, waited_ns=0, count=0, ready=False), True),
        ],
        ids=["had its turns", "waited for them", "waits for its first", "has nothing to do"],
    )
    def test_on_a_crowded_machine_it_has_to_last_longer(self, helper: processes.ThreadStats, lasts: bool) -> None:
        """Where threads wait for a processor, ranks may be idle only because of that."""
        main = processes.ThreadStats(ran_ns=1, waited_ns=0, count=1, ready=False)
        looks = iter(["main", "all", "main", "later"])
        told = {
            "main": {1: main},
            "all": {1: main, 2: processes.ThreadStats(0, 0, 0, False)},
            "later": {1: main, 2: helper},
        }
        still = IdlePeriod(lambda main_only: {0: told[next(looks)]})
        time.sleep(0.05)
        assert (True, lasts) == (still.is_idle(), still.lasted(0.05))

    def test_a_main_thread_that_waits_for_its_turn_is_about_to_move(self) -> None:
        """A main thread that is runnable is not idle, even if it has not run yet."""
        asleep = processes.ThreadStats(ran_ns=1, waited_ns=0, count=1, ready=False)
        looks = iter([asleep, asleep, replace(asleep, ready=True)])
        assert not IdlePeriod(lambda main_only: {0: {1: next(looks)}}).is_idle()


class TestFaults:
    def test_an_exception_without_a_message_is_its_class(self) -> None:
        """Without a message there is no colon."""
        assert "KeyError" == faults.one_line(KeyError())

    def test_an_exception_whose_message_breaks_is_still_told(self) -> None:
        """If `__str__` raises, the rest of the exception is still reported."""

        class OddError(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        assert "str() of the exception raised RuntimeError" in faults.one_line(OddError())

    @pytest.mark.parametrize(
        ("code", "words"),
        [
            (0, "exited with code 0"),
            (-9, "killed by SIGKILL"),
            (-11, "killed by SIGSEGV"),
            (-35, "killed by signal 35"),
        ],
    )
    def test_exits_are_told_in_words(self, code: int, words: str) -> None:
        """Signals are named, except real-time ones."""
        assert words == describe_exit(code)
