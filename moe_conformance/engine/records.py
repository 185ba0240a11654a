"""The dataclasses of the engine's interface: jobs, and their results per rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from .ledger.disagreement import Disagreement
from .ledger.entry import Asynchrony, Entry, Hazard

Partition = tuple[tuple[int, ...], ...]


class EngineError(Exception):
    """The engine was misused, or the machine failed; the function that was run is not at fault."""


NO_ANSWER = "no answer within"  # begins the error of a rank that took all of its deadline


@dataclass(frozen=True)
class Job:
    """One function to be run on every rank of a world.

    Attributes:
        function: `"package.module:function"`, imported on the ranks and called there as `function(context,
            payload)`.
        payload: Pickled once on the driver and sent to every rank. Tensors arrive as plain CPU tensors (see wire.py).
        world: The number of ranks.
        rank_payloads: One value per rank, sent to that rank alone as `RankContext.rank_payload`; or empty.
        groups: Named partitions of some or all of the ranks, e.g. `{"rows": ((0, 1), (2, 3))}`. Ranks ascend
            within a group and are in at most one group of a partition.
        deadline_s: Seconds from sending the job until a rank without an answer counts as hung. Includes importing the
            function and making groups that do not exist yet.
        asynchrony: How code is detected that uses the data of an asynchronous collective before it has waited.
            "poisoned": the output is hidden until the wait, and holds NaN or a very large integer (CPU only).
            "watched": every operator is inspected, and the source line is reported; slow. "delayed_compute",
            "delayed_communication": a stream is delayed (GPU only; see gpu/delays.py).
    """

    function: str
    payload: Any
    world: int
    groups: Mapping[str, Partition]
    deadline_s: float = 60.0
    asynchrony: Asynchrony = "plain"
    rank_payloads: Sequence[Any] = ()


@dataclass(frozen=True)
class RankContext:
    """The first argument of every function that is run on a rank.

    Attributes:
        rank: This rank, 0 to world - 1.
        world: The number of ranks; the default process group has exactly these.
        device: The device for this rank's tensors. Several ranks may share one GPU.
        groups: This rank's group of every named partition; partitions in which it has none are absent. A group is made
            once per tuple of ranks and kept for later jobs: two partitions with the same ranks share it.
        kept: What functions store for later jobs of the same process; empty on a replaced rank. A job that adds to it
            may also change the process (start threads, set variables), which then is not reported as left behind.
        calls: Returns how many collectives this job has called on this rank so far: the next one's `Entry.order`.
        rank_payload: This rank's value of `Job.rank_payloads`; None if the job has none.
        in_flight: Returns the `Entry.order` of every asynchronous collective that was not waited for yet.
    """

    rank: int
    world: int
    device: torch.device
    groups: Mapping[str, dist.ProcessGroup]
    kept: MutableMapping[str, Any]
    calls: Callable[[], int]
    rank_payload: Any = None
    in_flight: Callable[[], tuple[int, ...]] = tuple


@dataclass(frozen=True)
class RankResult:
    """How a job ended on one rank.

    Attributes:
        rank: The rank.
        status: "ok": it returned. "raised": an exception. "hung": no answer. "died": the process exited.
        value: What the function returned, if it did: picklable, and at most 2 GiB.
        error: One line: `"ValueError: ..."`, `"killed by SIGKILL"`, `"no answer within 5.0 s: ..."`. A rank with status
            "ok" has one if it returned while others waited for it in a collective, is blamed for a disagreement of
            ledgers, or has a hazard in its ledger.
        error_type: Qualified name of the exception's class: `"ValueError"`, `"package.module.Refused"`.
        error_attributes: The exception's own attributes that are plain str, int, float or bool.
        traceback: Python traceback of an exception; for a rank that hung or crashed, the stacks of its
            threads, innermost call first.
        secondary: True if this is the consequence of another rank's fault, so that the rank is not blamed.
        output: The end of what the rank printed while it ran a job that failed there.
        left: What the function left behind in its process, unless the same job added to `RankContext.kept`:
            "thread 'watcher'", "process 'sleep 9'", "environment variable 'DEBUG'", "the default dtype", "512 bytes of
            device memory". The ranks are then replaced.
        infrastructure: The fault of the machine that the rank's exception, stacks or output report, if any (see
            infrastructure.py): the function is then not to be blamed.
        host_syncs: How often a function that returned made the host wait for its GPU, as far as torch reports it; None
            on the CPU.
        ledger: The collectives, sends and receives that the function called through torch.distributed, up to its end or
            that of the process; at most the first 20 000. Direct calls of a backend object are not recorded.
        hazards: Errors in the use of buffers and handles of asynchronous calls. "never waited" is always detected, the
            others depend on `Job.asynchrony`.
    """

    rank: int
    status: Literal["ok", "raised", "hung", "died"]
    value: Any | None = None
    error: str | None = None
    error_type: str | None = None
    error_attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    traceback: str | None = None
    secondary: bool = False
    output: str | None = None
    left: tuple[str, ...] = ()
    infrastructure: str | None = None
    host_syncs: int | None = None
    ledger: tuple[Entry, ...] = ()
    hazards: tuple[Hazard, ...] = ()


@dataclass(frozen=True)
class JobResult:
    """How a job ended on all of its ranks.

    Attributes:
        ranks: One result per rank, in order.
        seconds: Until the last result was known; for a job that ran in a batch, the time on the slowest rank.
        disagreements: Where the ranks' ledgers disagree, the earliest first.
    """

    ranks: tuple[RankResult, ...]
    seconds: float
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the function returned on every rank and no ledger shows a fault."""
        return all(result.status == "ok" and result.error is None for result in self.ranks)

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks at fault, without those whose fault is secondary; empty if and only if `ok`."""
        return tuple(result.rank for result in self.ranks if result.error is not None and not result.secondary)

    @property
    def infrastructure(self) -> str | None:
        """The fault of the machine, if it explains the failure of every rank that is blamed; else None."""
        reasons = [self.ranks[rank].infrastructure for rank in self.blamed]
        return reasons[0] if reasons and all(reasons) else None


def check(job: Job) -> None:
    """Raises if a job is malformed.

    Raises:
        EngineError: says which field is wrong, and how.
    """
    module, colon, function = job.function.partition(":")
    if not (module and colon and function):
        raise EngineError(f"job function {job.function!r} is not of the form 'package.module:function'")
    if job.world < 1:
        raise EngineError(f"a world needs at least one rank, not {job.world}")
    if not job.deadline_s > 0:
        raise EngineError(f"the deadline must be a positive number of seconds, not {job.deadline_s}")
    if len(job.rank_payloads) not in (0, job.world):
        raise EngineError(f"`rank_payloads` has {len(job.rank_payloads)} values for {job.world} ranks")
    for name, partition in job.groups.items():
        _check_partition(name, partition, job.world)


def _check_partition(name: str, partition: Partition, world: int) -> None:
    seen: set[int] = set()
    for ranks in partition:
        if not isinstance(ranks, tuple) or not ranks or list(ranks) != sorted(set(ranks)):
            raise EngineError(f"groups[{name!r}]: {ranks} is not an ascending tuple of distinct ranks")
        if ranks[0] < 0 or ranks[-1] >= world:
            raise EngineError(f"groups[{name!r}]: {ranks} names a rank outside 0..{world - 1}")
        if twice := sorted(seen.intersection(ranks)):
            raise EngineError(f"groups[{name!r}]: ranks {twice} are in two groups of one partition")
        seen.update(ranks)
