"""The faults that are drilled, and what the engine must say of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["pass", "fail", "crash", "hang"]
Role = Literal["culprit", "partner", "peer", "bystander"]

# Who must be blamed: where "minority", the culprit if the group has at least three ranks; of two that disagree nobody
# can tell which is right, and both are blamed.
Blame = Literal["nobody", "culprit", "pair", "minority", "everyone"]

_PACKAGE = __name__.rpartition(".")[0]
_SHORT_S = 1.0  # for faults that nothing but the deadline ends
_LONG_S = 60.0  # for those that must be seen long before


@dataclass(frozen=True)
class Fault:
    """One fault, and all that must follow from it.

    Attributes:
        name: What happens, in a few words.
        job: The function that plays it, as `"module:function"` in this package.
        verdict: Of the job: "hang" if a rank gave no answer, else "crash" if a blamed rank raised or died, else "fail"
            if somebody is blamed, else "pass".
        blamed: Who is blamed.
        culprit: The culprit's status.
        peers: Which statuses the other ranks of the group may have; several where the transport decides by chance.
        says: A regular expression that the sentence of every blamed rank matches; of the culprit's `left` if nobody
            is blamed.
        scope: "world", or "group" for a group of some of the ranks; those that are not in it must not be blamed.
        stacks: Whether the culprit can leave a stack; a process that is killed or exits cannot.
        deadline_s: Of the job.
    """

    name: str
    job: str
    verdict: Verdict
    blamed: Blame
    culprit: tuple[str, ...]
    peers: tuple[str, ...]
    says: str
    scope: Literal["world", "group"] = "world"
    stacks: bool = True
    deadline_s: float = _LONG_S

    @property
    def function(self) -> str:
        """The function for the engine to run."""
        return f"{_PACKAGE}.{self.job}"


_DEADLOCK = r"can no longer complete"
_TIMEOUT = rf"no answer within {_SHORT_S}"

_ENDS = (
    Fault("exception on one rank", "ends:raise_on_one", "crash", "culprit", ("raised",), ("raised",), "ValueError"),
    Fault("exception on all ranks", "ends:raise_on_all", "crash", "everyone", ("raised",), ("raised",), "ValueError"),
    Fault(
        "exception in a backward hook", "ends:raise_in_backward", "crash", "culprit", ("raised",), ("raised",),
        "ValueError",
    ),
    Fault(
        "os._exit", "ends:exit_hard", "crash", "culprit", ("died",), ("raised",), "exited with code 7", stacks=False,
    ),
    Fault("SIGKILL", "ends:be_killed", "crash", "culprit", ("died",), ("raised",), "SIGKILL", stacks=False),
    Fault(
        "SIGKILL in the midst of work", "ends:be_killed_while_meeting", "crash", "culprit", ("died",), ("raised",),
        "SIGKILL", stacks=False,
    ),
    Fault("segmentation fault", "ends:touch_no_memory", "crash", "culprit", ("died",), ("raised",), "SIGSEGV"),
    Fault("out of memory", "ends:run_out_of_memory", "crash", "culprit", ("raised",), ("raised",), "MemoryError"),
    Fault(
        "hang in Python", "ends:sleep_for_ever", "hang", "culprit", ("hung",), ("hung",),
        f"{_TIMEOUT} s: in sleep_for_ever", deadline_s=_SHORT_S,
    ),
    Fault(
        "hang that holds the GIL", "ends:hold_the_gil", "hang", "culprit", ("hung",), ("hung",),
        f"{_TIMEOUT} s: in hold_the_gil", deadline_s=_SHORT_S,
    ),
    Fault(
        "hang on a lock", "ends:wait_for_a_lock", "hang", "culprit", ("hung",), ("hung",),
        _TIMEOUT, deadline_s=_SHORT_S,
    ),
    Fault(
        "SIGSTOP", "ends:be_stopped", "hang", "culprit", ("hung",), ("hung",),
        f"{_TIMEOUT} s: stopped by a signal", deadline_s=_SHORT_S,  # where: it may move on while it dumps its stack
    ),
    Fault(
        "printing without end", "ends:print_without_end", "hang", "culprit", ("hung",), ("hung",),
        _TIMEOUT, deadline_s=_SHORT_S,
    ),
)  # fmt: skip

# Of splits gloo itself notices that a rank does not send to itself what it expects, and raises; where it is sent more
# than it expects it aborts; where it is sent less it goes on with garbage.
_COLLECTIVES = (
    Fault(
        "last collective skipped", "collectives:skip_the_last", "hang", "culprit", ("ok",), ("hung",),
        "returned while",
    ),
    Fault(
        "middle collective skipped", "collectives:skip_one_in_the_middle", "hang", "minority", ("hung",), ("hung",),
        _DEADLOCK,
    ),
    Fault(
        "collective of another kind", "collectives:take_another_kind", "hang", "minority", ("hung",), ("hung",),
        _DEADLOCK,
    ),
    Fault(
        "collective on another group", "collectives:take_another_group", "hang", "minority", ("hung",), ("hung",),
        _DEADLOCK,
    ),
    Fault(
        "collective nobody else begins", "collectives:leave_one_alone", "fail", "minority", ("ok",), ("ok",), "",
    ),
    Fault(
        "splits that do not sum", "collectives:split_wrongly", "crash", "culprit", ("raised",), ("raised",),
        "[Ss]plit",
    ),
    Fault("one row fewer expected", "collectives:expect_fewer", "crash", "pair", ("died",), ("raised", "ok"), ""),
    Fault("one row more expected", "collectives:expect_more", "fail", "pair", ("ok",), ("ok",), ""),
    Fault(
        "splits swapped, equal totals", "collectives:swap_splits", "crash", "culprit", ("died", "raised"),
        ("raised", "ok"), "",
    ),
)  # fmt: skip

_REMAINS = (
    Fault(
        "unpicklable result", "remains:return_what_cannot_be_sent", "crash", "culprit", ("raised",), ("ok",),
        "a generator, cannot be sent",
    ),
    Fault(
        "result that cannot be loaded", "remains:return_what_cannot_be_loaded", "crash", "culprit", ("raised",),
        ("ok",), "cannot be read on the driver: ValueError", stacks=False,
    ),
    Fault(
        "result too large", "remains:return_too_much", "crash", "culprit", ("raised",), ("ok",), "GiB",
    ),
    Fault("thread left behind", "remains:leave_a_thread", "pass", "nobody", ("ok",), ("ok",), "thread 'left-behind'"),
    Fault("group left behind", "remains:leave_a_group", "pass", "nobody", ("ok",), ("ok",), "1 process group"),
    Fault(
        "environment left changed", "remains:leave_variables", "pass", "nobody", ("ok",), ("ok",),
        "'ENGINE_DRILL_LEFT_BEHIND'.*'OMP_NUM_THREADS'",
    ),
    Fault(
        "dtype and grad mode left changed", "remains:leave_a_default_dtype", "pass", "nobody", ("ok",), ("ok",),
        "dtype.*grad mode",
    ),
    Fault(
        "child processes left behind", "remains:leave_children", "pass", "nobody", ("ok",), ("ok",),
        "process '.*', process '.*'",
    ),
    Fault(
        "child processes of a rank that exits", "remains:leave_children_and_die", "crash", "culprit", ("died",),
        ("raised",), "exited with code 7", stacks=False,
    ),
    Fault(
        "channel closed", "remains:close_the_channel", "crash", "culprit", ("died",), ("ok",), "before it answered",
        stacks=False,
    ),
    Fault(
        "default group destroyed", "remains:destroy_the_default_group", "crash", "culprit", ("raised",), ("ok",),
        "destroyed the default process group",
    ),
)  # fmt: skip


def _on_a_group(fault: Fault) -> Fault:
    return replace(fault, name=f"{fault.name}, on a group", scope="group")


FAULTS = (*_ENDS, *(each for fault in _COLLECTIVES for each in (fault, _on_a_group(fault))), *_REMAINS)
