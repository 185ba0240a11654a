"""Judge of the rows that a dispatch sends on the wire that the backend claims, from the ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moe_conformance.chapters.cost.judge.claimed_wires import claimed_rows, pair_rows, smallest_rows
from moe_conformance.chapters.cost.judge.cost import Half, halves, require_rows, rows_sent
from moe_conformance.engine.ledger.entry import Entry
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.traffic import by_phase, carries_rows
from moe_conformance.judging.verdict import Costly, NotOffered
from moe_conformance.reference.cost import rows as cost


@judge(Costly, "run")
def judge_declared_rows(reading: Reading) -> Comparisons:
    """Decide whether dispatch and combine send the rows of the claimed wire, if it is not one row per pair.

    With a wire of more rows than routed pairs, either the number of pairs or that of the wire is right, none between
    them.

    Raises:
        Costly: more rows are sent, or other rows than are claimed.
        NotOffered: the backend claims no wire, or the ledger has fewer rows than must be sent.
    """
    wire = reading.claims.wire
    if wire == "pairs":
        raise NotOffered("the backend claims wire = 'pairs', the default: COST-03 counts its rows")
    require_rows(reading)
    if wire == "copies":
        yield from _compare_gathered(reading)
    else:
        for half in halves(reading):
            yield Comparison(None, _wrong_rows(reading, half), pairs=len(reading.ranks))


def _wrong_rows(reading: Reading, half: Half) -> str:
    """Return what is wrong with the rows of dispatch or combine, "" if nothing is."""
    wire = reading.claims.wire
    if wire == "tokens":
        smallest = half.times * smallest_rows(reading, half.m)
        return f"{half.name} moves {half.rows:g} rows; needed: {smallest}" if half.rows > smallest else ""
    claimed, pairs = claimed_rows(reading, half.m, half.name, half.times), half.times * pair_rows(reading, half.m)
    if half.rows > claimed or (half.times == 1 and pairs < half.rows < claimed):
        sentence = f"the backend claims wire = {wire!r}, which is {claimed} rows in {half.name}"
        reduced = wire == "all" and half.name.startswith("combine") and half.rows == 2 * claimed
        design = "; a backend that sums outputs by an all-reduce claims combined = 'all_reduced'" if reduced else ""
        return f"{sentence}, and it moves {half.rows:g}; the routed pairs are {pairs}{design}"
    return ""


def _compare_gathered(reading: Reading) -> Comparisons:
    """Yield whether tokens are gathered over tp as claimed, and other calls send no more than these need."""
    groups = reading.outcome.workload.layout.groups()
    tensor_group = {rank: tuple(group) for group in groups["tp"] for rank in group}
    phases = [by_phase(rank) for rank in reading.ranks]
    for m, batches in enumerate(reading.batches):
        tokens, sent = [len(batch.x_TD) for batch in batches], 0.0
        for rank in range(len(batches)):
            names = (f"{name}:{m}" for name in ("forward", "dispatch", "combine", "answered"))
            calls = [entry for name in names for entry in phases[rank].get(name, ())]
            group = tensor_group[rank]
            sizes = {tokens[rank], max(tokens[member] for member in group)}  # blocks may be padded to the largest block
            gathers = [entry for entry in calls if _gathers(reading, entry, group, sizes)]
            times = f"rank {rank} gathers its tokens {len(gathers)} times over {len(group)} tp ranks in microbatch {m}"
            wrong = f"the backend claims wire = 'copies', and {times}; expected: over 2 or more"
            yield Comparison(rank, "" if gathers and len(group) > 1 else wrong, pairs=1)
            sent += rows_sent(reading, calls, rank) - rows_sent(reading, gathers[:1], rank)  # one is the adapter's
        ids = [torch.cat([batches[member].ids_TK for member in tensor_group[rank]]) for rank in range(len(batches))]
        held = [rank.local_experts for rank in reading.ranks]
        pairs = int(cost.pair_rows(ids, groups["ep_etp"], held).sum())
        reduced = 2 * int(cost.all_gather_rows([len(member) for member in ids], groups["ep_etp"]).sum())
        allowed = pairs + max(pairs, reduced)
        wrong = (
            f"microbatch {m} sends {sent:g} rows in addition to the gather over tp; allowed: {allowed}, for dispatch"
        )
        yield Comparison(None, f"{wrong} and combine of the gathered tokens" if sent > allowed else "")


def _gathers(reading: Reading, entry: Entry, group: Sequence[int], sizes: set[int]) -> bool:
    """Return whether a call gathers the tokens of a rank over a group, padded to one of some sizes."""
    if not entry.op.startswith("all_gather") or tuple(entry.ranks) != tuple(group):
        return False
    hidden = reading.outcome.workload.config.hidden
    return carries_rows(entry, hidden) and sum(map(math.prod, entry.shapes_in)) // hidden in sizes
