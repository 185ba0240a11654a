"""Judge of layers whose shared experts overlap the exchange, compared with the layer without overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from moe_conformance.engine.ledger.entry import Entry, group_words
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.runs import RunTwins, read_twin
from moe_conformance.judging.shared.layer.layer import EVERY, judge_layer_dx, judge_layer_gradients, judge_layer_outputs
from moe_conformance.judging.verdict import NotOffered, Tally, WrongCollectives
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.twins import Twin, the_same


def judge_overlap(reading: Reading, twins: RunTwins, tally: Tally) -> None:
    """Decide whether overlap changes no result beyond rounding, and no call of the exchange.

    Every rank makes each call of the exchange, with its kind, splits, bytes and group, as often as without overlap.
    With tp > 1 only all-to-alls are compared: a backward may repeat a gather over tp.

    Raises:
        NotOffered: the layer without overlap did not run.
        WrongForm, WrongOutput, AbsentGradient, WrongGradient: as the judges of layers, for either run.
        WrongCollectives: a rank makes a call more or less often than without overlap.
    """
    (ran,) = twins([without_overlap(reading.outcome.workload)])
    if ran.outcome is None:
        raise NotOffered(ran.why_not)
    plain = read_twin(ran)
    for of_run in (reading, plain):
        judge_layer_outputs(of_run, tally)
        judge_layer_dx(of_run, tally)
        judge_layer_gradients(of_run, tally, EVERY)
    _judge_calls(reading, tally, plain)


@judge(WrongCollectives, "run")
def _judge_calls(reading: Reading, plain: Reading) -> Comparisons:
    for overlapped, alone in zip(reading.ranks, plain.ranks, strict=True):
        now, then = (Counter(_calls(rank.ledger, reading.outcome.workload.layout.tp)) for rank in (overlapped, alone))
        for call in now | then:
            if now[call] != then[call]:
                times = f"{now[call]} times instead of {then[call]} times without overlap"
                yield Finding("calls", f"rank {overlapped.rank} calls {call} {times}", (overlapped.rank,))
        yield Comparison(overlapped.rank, pairs=now.total())


def without_overlap(workload: Workload) -> Twin:
    """Return the run of the same layer without overlap of shared experts and exchange."""
    config = workload.config.changed({"shared.overlap": False})
    plain = replace(workload, name=f"{workload.name}, without overlap", config=config)
    return Twin("without overlap", plain, the_same(workload), torch.arange(config.experts))


def _calls(ledger: Sequence[Entry], tp: int) -> Iterator[str]:
    """Yield a description of every compared call that does not depend on its time."""
    for entry in ledger:
        if tp == 1 or entry.op.startswith("all_to_all"):
            sent, received = (list(splits or ()) for splits in (entry.in_splits, entry.out_splits))
            splits = f" of rows {sent} for {received}" if sent or received else ""
            yield f"{entry.op} on {group_words(entry.ranks)}{splits} ({entry.bytes_in} bytes)"
