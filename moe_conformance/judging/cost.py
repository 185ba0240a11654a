"""What a step costs on the wire, from the ledgers: calls, rows of width D, and what travels beside them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from moe_conformance.contract import WIRES
from moe_conformance.engine.ledger.entry import Entry, group_words
from moe_conformance.judging.diagnosis import some
from moe_conformance.judging.reading import Reading
from moe_conformance.judging.traffic import by_phase, bytes_leaving, carries_rows, rows_leaving
from moe_conformance.judging.verdict import Costly, NotOffered, Tally, WrongForm
from moe_conformance.scenarios.outcome import RankOutcome
from reference import cost, cost_bytes, cost_calls


def judge_no_calls(reading: Reading, tally: Tally) -> None:
    """Decide whether an exchange of one rank with itself makes no collective, in forward and backward.

    Raises:
        Costly: it makes one.
    """
    found = []
    for rank in reading.ranks:
        for phase, calls in _exchange_phases(rank):
            if not cost_calls.legal_calls(len(calls), ranks=1):
                found.append(f"rank {rank.rank} calls {_words(calls)} in {phase}, where nothing has to move")
            tally.add(pairs=1, rank=rank.rank)
    if found:
        raise Costly("run", some(found))


def judge_even_calls(reading: Reading, tally: Tally) -> None:
    """Decide whether every microbatch takes the same number of collectives, on all ranks of an exchange group.

    Raises:
        Costly: two differ.
    """
    calls_by_kind: dict[tuple[tuple[int, ...], str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for group in reading.outcome.workload.layout.groups()["ep_etp"]:
        for rank in group:
            for phase, calls in _exchange_phases(reading.ranks[rank]):
                calls_by_kind[group, phase.partition(":")[0]][phase].append(len(calls))
                tally.add(pairs=1, rank=rank)
    found = [
        f"{kind} takes other numbers of collectives on {group_words(group)}: "
        + ", ".join(f"{numbers} in {phase}" for phase, numbers in by_case.items())
        for (group, kind), by_case in calls_by_kind.items()
        if not cost_calls.same_calls(list(by_case.values()))
    ]
    if found:
        raise Costly("run", some(found))


def judge_rows(reading: Reading, tally: Tally) -> None:
    """Decide whether a forward moves no more rows than what the backend says of its wire needs, in each direction.

    A forward is a dispatch and a combine: twice the rows of one.

    Raises:
        Costly: it moves more.
        WrongForm: the backend says something unknown of its wire.
        NotOffered: the ledger sees fewer rows than must travel, so that they travel in another form; or the rows of the
            adapter's own copying are among them.
    """
    found, wire = [], _wire(reading)
    if wire == "copies":
        raise NotOffered("the adapter copies tokens to tensor ranks, and its rows would be counted")
    for m, forwards in _forwards(reading).items():
        allowed, smallest = 2 * _needed(reading, m), 2 * _smallest(reading, m)
        moved = sum(_rows(reading, calls, rank) for rank, calls in forwards.items())
        if moved < smallest:
            raise NotOffered(f"the ledger sees {moved:g} of at least {smallest} rows of width D in a forward")
        if moved > allowed:
            times = cost.ratio(round(moved), smallest)
            found.append(f"forward:{m} moves {moved:g} rows, {times:.3g} times the least, where {allowed} should do")
        else:
            tally.add(pairs=len(forwards), worst=moved / allowed if allowed else 0.0)
    if found:
        raise Costly("run", some(found))


def judge_token_rows(reading: Reading, tally: Tally) -> None:
    """Decide whether a token travels once to each other rank that needs it, and its answer back, if that is said.

    Raises:
        Costly: other numbers of rows travel.
        NotOffered: the backend says something else of its wire.
    """
    if (wire := _wire(reading)) != "tokens":
        raise NotOffered(f"the backend says that its wire carries {wire!r}")
    found = []
    for m, forwards in _forwards(reading).items():
        moved, smallest = sum(_rows(reading, calls, rank) for rank, calls in forwards.items()), _smallest(reading, m)
        if moved != 2 * smallest:
            found.append(f"forward:{m} moves {moved:g} rows, {smallest} there and {smallest} back are needed")
        tally.add(pairs=len(forwards))
    if found:
        raise Costly("run", some(found))


def judge_backward_rows(reading: Reading, tally: Tally) -> None:
    """Decide whether a backward moves no more rows than its forward, and exchanges no counts or indices again.

    Raises:
        Costly: it does.
    """
    found = []
    forwards = _forwards(reading)
    for m, forward in forwards.items():
        if not reading.goes_backward(m):
            continue
        for rank, calls in forward.items():
            back = by_phase(reading.ranks[rank])[f"backward:{m}"]
            there, here = _rows(reading, calls, rank), _rows(reading, back, rank)
            again = [entry for entry in back if entry.shapes_in and "float" not in entry.dtype]
            if here > there:
                found.append(f"backward:{m} moves {here:g} rows off rank {rank}, and forward {there:g}")
            if again:
                found.append(f"backward:{m} exchanges {again[0].dtype} again on rank {rank}: {_words(again)}")
            tally.add(pairs=1, rank=rank)
    if found:
        raise Costly("gradient", some(found))


def judge_beside_rows(reading: Reading, tally: Tally) -> None:
    """Decide whether what a forward sends beside its rows grows with ranks, experts and moved rows only.

    Raises:
        Costly: it sends more bytes.
    """
    config, found = reading.outcome.workload.config, []
    W = reading.outcome.workload.layout.ep * reading.outcome.workload.layout.etp
    for m, forwards in _forwards(reading).items():
        for rank, calls in forwards.items():
            rows = _rows(reading, calls, rank)
            beside = sum(bytes_leaving(entry, rank) for entry in calls if not carries_rows(entry, config.hidden))
            allowed = cost_bytes.metadata_bytes(W, config.experts, config.top_k, math.ceil(rows))
            if beside > allowed:
                found.append(f"rank {rank} sends {beside:g} bytes beside {rows:g} rows in forward:{m}, over {allowed}")
            else:
                tally.add(pairs=1, rank=rank, worst=beside / allowed)
    if found:
        raise Costly("dispatch", some(found))


def judge_repeated(reading: Reading, tally: Tally) -> None:
    """Decide whether the same microbatch, run again and again, makes the same calls after the first time.

    Raises:
        Costly: some step calls something else than the second.
    """
    found = []
    for rank in reading.ranks:
        steps: dict[str, list[list[object]]] = defaultdict(list)
        for phase, calls in _exchange_phases(rank):
            steps[phase.partition(":")[0]].append([_call(entry) for entry in calls])
        for kind, calls_by_step in steps.items():
            if not cost_calls.settled(calls_by_step):
                numbers = [len(calls) for calls in calls_by_step]
                found.append(f"rank {rank.rank} does not repeat its calls in each {kind} of a batch: {numbers} of them")
            tally.add(pairs=len(calls_by_step) - 1, rank=rank.rank)
    if found:
        raise Costly("run", some(found))


def judge_reductions(reading: Reading, tally: Tally) -> None:
    """Decide whether gradients of experts travel between replicas only, while they are finished.

    Counts calls that carry as many elements as a part of a parameter: norms and flags are fewer.

    Raises:
        Costly: they travel elsewhere.
        NotOffered: the backend finishes no gradients.
    """
    workload, found = reading.outcome.workload, []
    if any(rank.grads_final is None for rank in reading.ranks):
        raise NotOffered(reading.ranks[0].finish_refusal or "the backend finishes no gradients")
    least = min(value.numel() for value in workload.parameters.values()) // workload.layout.etp
    for group in workload.layout.groups()["edp"]:
        for rank in group:
            for entry in by_phase(reading.ranks[rank])["finish"]:
                elements = sum(map(math.prod, entry.shapes_in))
                if elements >= least and not cost_calls.legal_reduction(entry.ranks, group):
                    where = f"{group_words(entry.ranks)}, where replicas are {group_words(group)}"
                    found.append(f"rank {rank} calls {entry.op} of {elements} elements on {where}")
            tally.add(pairs=1, rank=rank)
    if found:
        raise Costly("finish", some(found))


def _exchange_phases(rank: RankOutcome) -> Iterator[tuple[str, Sequence[Entry]]]:
    """List all phases but that which finishes gradients."""
    return ((phase, calls) for phase, calls in by_phase(rank).items() if phase != "finish")


def _forwards(reading: Reading) -> Mapping[int, Mapping[int, Sequence[Entry]]]:
    """Return the calls of every microbatch's forward, in halves or not, rank by rank."""
    return {
        m: {
            rank.rank: [
                entry
                for phase, calls in by_phase(rank).items()
                if phase in (f"forward:{m}", f"dispatch:{m}", f"combine:{m}")
                for entry in calls
            ]
            for rank in reading.ranks
        }
        for m in range(len(reading.batches))
    }


def _rows(reading: Reading, calls: Sequence[Entry], rank: int) -> float:
    hidden = reading.outcome.workload.config.hidden
    return sum(rows_leaving(entry, rank, hidden) for entry in calls if carries_rows(entry, hidden))


def _needed(reading: Reading, m: int) -> int:
    """Count the rows that a dispatch should move at most, by what the backend says of its wire."""
    wire = _wire(reading)
    if wire == "pairs":
        return int(cost.pair_rows(*_routed(reading, m)).sum())
    if wire == "tokens":
        return _smallest(reading, m)
    sizes = [len(batch.x_TD) for batch in reading.batches[m]]
    return int(cost.all_gather_rows(sizes, reading.outcome.workload.layout.groups()["ep_etp"]).sum())


def _wire(reading: Reading) -> str:
    wire = reading.ranks[0].resolved.get("wire", "pairs")
    if wire not in WIRES:
        raise WrongForm("run", f"the backend says that its wire carries {wire!r}, which is none of {WIRES}")
    return wire


def _smallest(reading: Reading, m: int) -> int:
    return int(cost.least_rows(*_routed(reading, m)).sum())


def _routed(reading: Reading, m: int) -> tuple[list[torch.Tensor], Sequence[Sequence[int]], list[tuple[int, ...]]]:
    ids = [batch.ids_TK for batch in reading.batches[m]]
    return ids, reading.outcome.workload.layout.groups()["ep_etp"], [rank.local_experts for rank in reading.ranks]


def _call(entry: Entry) -> tuple[object, ...]:
    return entry.op, entry.ranks, entry.in_splits, entry.out_splits, entry.shapes_in, entry.shapes_out, entry.dtype


def _words(calls: Sequence[Entry]) -> str:
    return some([f"{entry.op} on {group_words(entry.ranks)}" for entry in calls])
