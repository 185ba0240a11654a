"""What goes into the engine and what comes out of it."""

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
    """The engine was misused, or the machine would not let it work; no function on a rank is at fault."""


NO_ANSWER = "no answer within"  # begins the error of a rank that took all of its deadline


@dataclass(frozen=True)
class Job:
    """One function to be run on every rank of a world.

    Attributes:
        function: `"package.module:function"`, imported on the ranks and called there as `function(context,
            payload)`.
        payload: Pickled once on the driver and sent to every rank. Tensors arrive as plain CPU tensors (see
            wire.py).
        world: The number of ranks.
        rank_payloads: One value per rank, sent to that rank alone as `RankContext.rank_payload`; or empty.
        groups: Named partitions of some or all of the ranks, e.g. `{"rows": ((0, 1), (2, 3))}`. Ranks ascend
            within a group and are in at most one group of a partition.
        deadline_s: Seconds from sending the job until ranks without an answer are taken for hung. Includes
            importing the function and making groups that do not exist yet.
        asynchrony: What is done to find those who use the data of an asynchronous collective before they waited for
            it. "poisoned": what it delivers is hidden until then, and NaN or a very large integer stands there (CPU
            only). "watched": each operator is looked at, and the line that does it is named; slow. "delayed_compute",
            "delayed_communication": a stream is late (GPU only; see gpu/delays.py).
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
    """What a function is given on its rank.

    Attributes:
        rank: This rank, 0 to world - 1.
        world: The number of ranks; the default process group has exactly these.
        device: Where this rank's tensors belong. Several ranks may share one GPU.
        groups: This rank's group of every named partition, absent where the rank is in none. A group is made
            once per tuple of ranks and kept for later jobs: two partitions that name the same ranks share it.
        kept: What functions leave here for later jobs of the same process. A replaced rank starts with nothing. A
            job that adds to it may change the process too (start threads, set variables): it made something to last.
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
    """How a job went on one rank.

    Attributes:
        rank: The rank.
        status: "ok" returned, "raised" an exception, "hung" gave no answer, "died" ended as a process.
        value: What the function returned, if it did: picklable, and at most 2 GiB.
        error: One line: `"ValueError: ..."`, `"killed by SIGKILL"`, `"no answer within 5.0 s: ..."`. A rank
            with status "ok" has one if it returned while others waited for it in a collective, or its ledger is to
            blame for a disagreement or holds a hazard.
        error_type: Qualified name of the exception's class: `"ValueError"`, `"package.module.Refused"`.
        error_attributes: The exception's own attributes that are plain str, int, float or bool.
        traceback: Python traceback of an exception; for a rank that hung or crashed, the stacks of its
            threads, innermost call first.
        secondary: True where this is the consequence of another rank's fault and not to be blamed.
        output: The end of what a rank printed while it ran a job that failed there.
        left: What the function left behind in its process and did not keep in `RankContext.kept` in the same job:
            "thread 'watcher'", "process 'sleep 9'", "environment variable 'DEBUG'", "the default dtype", "512 bytes of
            device memory". The ranks are then replaced.
        infrastructure: What was wrong with the machine, where the rank's exception, its stacks or what it printed say
            that something was (see infrastructure.py): the function is then not to be blamed.
        host_syncs: How often a function that returned made the host wait for its GPU, as far as torch can tell; None
            on the CPU.
        ledger: Every call of a collective, send or receive that the function made through torch.distributed, up to
            its end or that of the process, the first 20 000; those of a backend past its group are not seen.
        hazards: What the function did to buffers and handles of asynchronous calls; "never waited" is always seen, and
            the others as far as `Job.asynchrony` lets them be.
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
    """How a job went.

    Attributes:
        ranks: One result per rank, in order.
        seconds: Until the last was known; of a job that ran together with others, those of the slowest rank.
        disagreements: Where the ranks' ledgers do not fit together, the earliest first.
    """

    ranks: tuple[RankResult, ...]
    seconds: float
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def ok(self) -> bool:
        """True where every rank returned, and none is to blame for what its ledger holds."""
        return all(result.status == "ok" and result.error is None for result in self.ranks)

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks at fault, without those that only suffered from them; empty if and only if `ok`."""
        return tuple(result.rank for result in self.ranks if result.error is not None and not result.secondary)

    @property
    def infrastructure(self) -> str | None:
        """What was wrong with the machine, if that is why the ranks at fault failed, each of them."""
        reasons = [self.ranks[rank].infrastructure for rank in self.blamed]
        return reasons[0] if reasons and all(reasons) else None


def check(job: Job) -> None:
    """Refuses a job that no world could run.

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
