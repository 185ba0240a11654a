"""Judges of equal steps that are repeated: their calls, and the process groups and memory that each leaves."""

from __future__ import annotations

from collections import defaultdict

from moe_conformance.chapters.cost.judge.cost import require_rows
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.traffic import exchange_phases, signature
from moe_conformance.judging.verdict import Costly, NotOffered
from moe_conformance.reference.cost import calls as cost_calls
from moe_conformance.scenarios.memory import LONGER
from moe_conformance.scenarios.outcome import RankOutcome


@judge(Costly, "run")
def judge_repeated(reading: Reading) -> Comparisons:
    """Decide whether the repetitions of one microbatch make the same calls from the second time on.

    The number of process groups, counted after every backward, is the same too. Steps of which the suite keeps nothing
    leave less than half of the bytes of x allocated; the records of the suite are smaller than that.

    Raises:
        Costly: some step makes other calls than the second, changes the number of groups, or keeps memory.
        NotOffered: the ledger has fewer rows than must be sent.
    """
    for rank in reading.ranks:
        yield from _compare_calls(rank)
        groups = ", ".join(map(str, rank.live_groups))
        wrong = f"rank {rank.rank} has another number of process groups after each step: {groups}"
        yield Comparison(rank.rank, wrong if len(set(rank.live_groups[1:])) > 1 else "")
        yield from _compare_bytes(reading, rank)
    require_rows(reading)


@judge(Costly, "run")
def judge_kept_memory(reading: Reading) -> Comparisons:
    """Decide whether each step of which the suite keeps nothing leaves less than half of the bytes of x.

    Raises:
        Costly: some rank keeps more after every one of them.
        NotOffered: no rank can count what is allocated.
    """
    if all(number is None for rank in reading.ranks for number in rank.bytes_in_use):
        raise NotOffered("the C library of the ranks does not tell how many bytes are allocated")
    for rank in reading.ranks:
        yield from _compare_bytes(reading, rank)


def _compare_calls(rank: RankOutcome) -> Comparisons:
    steps: dict[str, list[list[object]]] = defaultdict(list)
    for phase, calls in exchange_phases(rank):
        steps[phase.partition(":")[0]].append([signature(entry) for entry in calls])
    for kind, calls_by_step in steps.items():
        numbers = [len(calls) for calls in calls_by_step]
        wrong = f"rank {rank.rank} makes different calls in equal {kind} passes of one batch: {numbers} calls"
        yield Comparison(rank.rank, "" if cost_calls.settled(calls_by_step) else wrong, pairs=len(calls_by_step) - 1)


def _compare_bytes(reading: Reading, rank: RankOutcome) -> Comparisons:
    in_use = [number for number in rank.bytes_in_use if number is not None]
    if not in_use:  # allocated bytes cannot be counted in this process
        return
    x_TD = reading.batches[0][rank.rank].x_TD
    grown, size = cost_calls.growth(in_use), LONGER * x_TD.nbytes
    left = f"rank {rank.rank} leaves {grown} or more bytes allocated after each of {len(in_use)} equal steps"
    allocated = ", ".join(map(str, in_use))
    wrong = f"{left} with {size} bytes of x; expected: none (allocated: {allocated})"
    yield Comparison(rank.rank, wrong if grown >= size // 2 else "", pairs=len(in_use) - 1)
