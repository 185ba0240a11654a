"""The table of faults that the drill injects, with what the engine must report of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["pass", "fail", "crash", "hang"]
Status = Literal["ok", "raised", "hung", "died"]
Role = Literal["faulty", "partner", "peer", "nonmember"]

# Which ranks must be blamed. "minority" is the faulty rank if the group has at least three ranks; of two ranks that
# disagree neither is known to be right, and both are blamed.
Blame = Literal["nobody", "faulty", "pair", "minority", "everyone"]

_PACKAGE = __name__.rpartition(".")[0]
_SHORT_S = 1.0  # for faults that only the deadline ends
_LONG_S = 60.0  # for faults that must be detected long before


@dataclass(frozen=True)
class Fault:
    """One fault, with everything that the engine must report of it.

    Attributes:
        name: What happens, in a few words.
        job: The function that causes it, as `"module:function"` in this package.
        verdict: The verdict on the job: "hang" if a rank gave no answer, else "crash" if a blamed rank raised or died,
            else "fail" if a rank is blamed, else "pass". Several if it depends on the transport and the number of
            ranks.
        blamed: Which ranks are blamed.
        faulty: Which statuses the faulty rank may have; several for the same reason.
        peers: Which statuses the other ranks of the group may have.
        says: A regular expression for the error of every blamed rank, or the first disagreement of the ledgers; if no
            rank is blamed, for what the faulty rank left behind.
        calls: Regular expressions for the calls in the ledgers of the faulty rank and of the other ranks of the group.
        disagrees: Whether the ledgers disagree.
        scope: "world", or "group" for a group of some of the ranks; ranks outside of it must not be blamed.
        stacks: Whether the faulty rank can dump a stack; a process that is killed or exits cannot.
        deadline_s: The deadline of the job.
    """

    name: str
    job: str
    verdict: tuple[Verdict, ...]
    blamed: Blame
    faulty: tuple[Status, ...]
    peers: tuple[Status, ...]
    says: str
    calls: tuple[str, str] = ("all_reduce", "all_reduce")
    disagrees: bool = False
    scope: Literal["world", "group"] = "world"
    stacks: bool = True
    deadline_s: float = _LONG_S

    @property
    def function(self) -> str:
        """The name of the function, as `Job.function` has it."""
        return f"{_PACKAGE}.{self.job}"


def _end(name: str, job: str, status: Status, says: str, *, stacks: bool = True) -> Fault:
    """Returns the fault of a rank that raises or exits while the others wait in their second collective."""
    calls = ("all_reduce", "all_reduce all_reduce")
    return Fault(name, f"failures:{job}", ("crash",), "faulty", (status,), ("raised",), says, calls, stacks=stacks)


def _hang(name: str, job: str, says: str = "") -> Fault:
    """Returns the fault of a rank that never calls the second collective, in which the others wait for it."""
    return Fault(
        name,
        f"failures:{job}",
        ("hang",),
        "faulty",
        ("hung",),
        ("hung",),
        f"no answer within {_SHORT_S} s: {says}",
        ("all_reduce", "all_reduce all_reduce"),
        deadline_s=_SHORT_S,
    )


_FAILURES = (
    _end("exception on one rank", "raise_on_one", "raised", "ValueError: drilled"),
    Fault(
        "exception on all ranks", "failures:raise_on_all", ("crash",), "everyone", ("raised",), ("raised",),
        "ValueError: drilled",
    ),
    _end("exception in a backward hook", "raise_in_backward", "raised", "ValueError: drilled"),
    _end("os._exit", "exit_hard", "died", "exited with code 7", stacks=False),
    _end("SIGKILL", "be_killed", "died", "killed by SIGKILL", stacks=False),
    Fault(
        "SIGKILL in the midst of work", "failures:be_killed_in_a_collective", ("crash",), "faulty", ("died",),
        ("raised",), "killed by SIGKILL", ("(all_reduce ?)+", "(all_reduce ?)+"), stacks=False,
    ),
    _end("segmentation fault", "touch_no_memory", "died", "killed by SIGSEGV"),
    _end("out of memory", "run_out_of_memory", "raised", "MemoryError"),
    _hang("hang in Python", "sleep_for_ever", "in sleep_for_ever"),
    _hang("hang that holds the GIL", "hold_the_gil", "in hold_the_gil"),
    _hang("hang on a lock", "wait_for_a_lock"),
    _hang("SIGSTOP", "be_stopped", "stopped by a signal"),  # the location varies: it continues while it dumps its stack
    _hang("printing without end", "print_without_end"),
)  # fmt: skip


def _collective(
    name: str,
    job: str,
    verdict: Verdict | tuple[Verdict, ...],
    blamed: Blame,
    faulty: tuple[Status, ...],
    peers: tuple[Status, ...],
    says: str,
    calls: tuple[str, str],
    *,
    disagrees: bool = True,
) -> Fault:
    """Returns a fault of the calls that follow the first one on a group; `calls` leaves out the first."""
    verdicts = (verdict,) if isinstance(verdict, str) else verdict
    of_faulty, others = (f"all_reduce {call}".strip() for call in calls)
    return Fault(
        name, f"collectives:{job}", verdicts, blamed, faulty, peers, says, (of_faulty, others), disagrees=disagrees
    )


_EXCHANGE = ("all_to_all_single", "all_to_all_single")

# What gloo does with splits that do not match: a rank that sends itself another number of rows than it expects raises;
# a rank that is sent more than it expects aborts; a rank that is sent less continues with uninitialised memory.
_COLLECTIVES = (
    _collective(
        "last collective skipped", "skip_the_last", "hang", "faulty", ("ok",), ("hung",),
        "returned while .* waited .*makes no such call", ("", "all_reduce"),
    ),
    _collective(
        "middle collective skipped", "skip_one_in_the_middle", "hang", "minority", ("hung",), ("hung",),
        "cannot complete", ("all_reduce", "all_gather"),
    ),
    _collective(
        "collective of another kind", "take_another_kind", "hang", "minority", ("hung",), ("hung",),
        "cannot complete", ("all_gather", "all_reduce"),
    ),
    _collective(
        "collective on another group", "take_another_group", "hang", "minority", ("hung",), ("hung",),
        "cannot complete", ("all_reduce", "all_reduce"),
    ),
    _collective(
        "collective of another size", "take_another_size", ("crash", "hang"), "minority", ("died", "ok", "hung"),
        ("raised", "hung"), "7 elements", ("all_reduce", "all_reduce"),
    ),
    _collective(
        "broadcast from another root", "take_another_root", "hang", "minority", ("hung",), ("hung", "ok"),
        "has root|have root", ("broadcast", "broadcast"),
    ),
    _collective(
        "message that nobody sends", "receive_from_nobody", "hang", "pair", ("hung",), ("ok",),
        "which never sends it", ("recv", ""),
    ),
    _collective(
        "collective nobody else begins", "begin_one_alone", "fail", "minority", ("ok",), ("ok",),
        "make no such call|makes no such call", ("all_reduce", ""),
    ),
    _collective(
        "handle never waited for", "never_wait", "fail", "faulty", ("ok",), ("ok",),
        "was never waited for", ("all_reduce", "all_reduce"), disagrees=False,
    ),
    _collective(
        "splits that do not sum", "split_wrongly", "crash", "faulty", ("raised",), ("raised",),
        r"sends \d+ rows in splits", _EXCHANGE,
    ),
    _collective(
        "one row fewer expected", "expect_fewer", "crash", "pair", ("died",), ("raised", "ok"),
        "rows? to rank ., which expects", _EXCHANGE,
    ),
    _collective(
        "one row more expected", "expect_more", "fail", "pair", ("ok",), ("ok",),
        "rows? to rank ., which expects", _EXCHANGE,
    ),
    _collective(
        "splits swapped, equal totals", "swap_splits", "crash", "faulty", ("died", "raised"), ("raised", "ok"),
        "rows? to rank ., which expects", _EXCHANGE,
    ),
)  # fmt: skip


def _bad_result(name: str, job: str, says: str, *, stacks: bool = True) -> Fault:
    """Returns the fault of a function whose result cannot be sent or loaded."""
    return Fault(name, f"leftovers:{job}", ("crash",), "faulty", ("raised",), ("ok",), says, stacks=stacks)


def _left(name: str, job: str, says: str) -> Fault:
    """Returns the fault of a function that returns and leaves something behind."""
    return Fault(name, f"leftovers:{job}", ("pass",), "nobody", ("ok",), ("ok",), says)


_LEFTOVERS = (
    _bad_result("unpicklable result", "return_what_cannot_be_sent", "a generator, cannot be sent"),
    _bad_result(
        "result that cannot be loaded", "return_what_cannot_be_loaded", "cannot be read on the driver: ValueError",
        stacks=False,
    ),
    _bad_result("result too large", "return_too_much", r"takes 1024\.0 GiB, and more than .* are not sent"),
    _bad_result("default group destroyed", "destroy_the_default_group", "destroyed the default process group"),
    Fault(
        "channel closed", "leftovers:close_the_channel", ("crash",), "faulty", ("died",), ("ok",), "before it answered",
        stacks=False,
    ),
    Fault(
        "channel written into", "leftovers:write_into_the_channel", ("crash",), "faulty", ("raised",), ("ok",),
        r"unexpected bytes in this rank's channel .* b'drilled\\n' is not the start of a message", stacks=False,
    ),
    _left("thread left behind", "leave_a_thread", "thread 'left-behind'"),
    _left("group left behind", "leave_a_group", "1 process group"),
    _left("environment left changed", "leave_variables", "'ENGINE_DRILL_LEFT_BEHIND'.*'OMP_NUM_THREADS'"),
    _left("dtype and grad mode left changed", "leave_a_default_dtype", "dtype.*grad mode"),
    _left("child processes left behind", "leave_children", "process '.*', process '.*'"),
    Fault(
        "child processes of a rank that exits", "leftovers:leave_children_and_die", ("crash",), "faulty", ("died",),
        ("raised",), "exited with code 7", ("all_reduce", "all_reduce all_reduce"), stacks=False,
    ),
)  # fmt: skip


def _on_a_group(fault: Fault) -> Fault:
    return replace(fault, name=f"{fault.name}, on a group", scope="group")


FAULTS = (*_FAILURES, *(variant for fault in _COLLECTIVES for variant in (fault, _on_a_group(fault))), *_LEFTOVERS)
