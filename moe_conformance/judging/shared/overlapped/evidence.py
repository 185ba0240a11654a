"""Judges of whether an overlapped step overlaps: work during collectives, calls, and the order of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moe_conformance.engine.ledger.entry import Entry, group_words
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import count, some
from moe_conformance.judging.observed.ledgers import judge_agreement
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.overlapped.steps import seen
from moe_conformance.judging.verdict import Costly, NotOffered, Tally, WrongCollectives, WrongGradient
from moe_conformance.scenarios.outcome import RankOutcome
from moe_conformance.scenarios.overlapped import StepSeen


@judge(Costly, "run")
def judge_overlapping(reading: Reading) -> Comparisons:
    """Decide whether at least one exchange per layer was in flight on every rank while other work ran.

    Work is a matrix product between the call of a collective and its wait, which cannot depend on the collective. A
    rank on which no product ran, as it has no rows, is not judged.

    Raises:
        NotOffered: the backend claims that it does not overlap; no rank has a collective or a product.
        Costly: fewer exchanges than layers were in flight during a product.
    """
    if reading.claims.overlap == "no":
        raise NotOffered("the backend claims overlap = 'no'")
    layers, judged = reading.outcome.workload.config.overlap.layers, False
    for rank in reading.ranks:
        entries = entries_of(rank, seen(rank).overlapped[0])
        if not entries or not seen(rank).worked:
            continue
        judged = True
        exchanges = [entry for entry in entries if entry.order in seen(rank).products]
        wrong = _said(rank, entries, exchanges, layers) if len(exchanges) < layers else ""
        yield Comparison(rank.rank, wrong, pairs=len(exchanges), kind="overlap")
    if not judged:
        raise NotOffered("the ledger has no collective of any rank with something to compute: overlap is unproved")


def _said(rank: RankOutcome, entries: list[Entry], exchanges: list[Entry], layers: int) -> str:
    blocking = sum(not entry.asynchronous for entry in entries)
    during = f"{count(len(exchanges), 'collective')} in flight while it computes"
    of = f"of {len(entries)}, {blocking} of which block"
    return f"rank {rank.rank} has {during} ({of}); expected {count(layers, 'collective')} or more, one for each layer"


def judge_calls(reading: Reading, tally: Tally) -> None:
    """Decide whether a rank makes the calls of the sequential step, in any order that its group shares.

    Raises:
        NotOffered: the ledger has no collective.
        WrongCollectives: a call is made more often or less, or the ranks of a group do not agree.
    """
    judge_agreement(reading.outcome, tally)
    _judge_same_calls(reading, tally)


@judge(WrongCollectives, "run")
def _judge_same_calls(reading: Reading) -> Comparisons:
    for rank in reading.ranks:
        steps = seen(rank).sequential, seen(rank).overlapped[0]
        then, now = (Counter(map(call_words, entries_of(rank, step))) for step in steps)
        for call in now | then:
            if now[call] != then[call]:
                times = f"{count(now[call], 'time')} instead of {count(then[call], 'time')} in the sequential step"
                yield Comparison(rank.rank, f"rank {rank.rank} calls {call} {times}", kind="calls")
        yield Comparison(rank.rank, pairs=now.total())


@judge(WrongGradient, "gradient")
def judge_order(reading: Reading) -> Comparisons:
    """Decide whether each pass writes the gradient of the down projection before those of gate and up.

    Raises:
        NotOffered: gradients are not written in place, or one write is of several gradients.
        WrongGradient: gate or up were written more often than down so far.
    """
    seen_any = False
    for rank in reading.ranks:
        for layer in range(reading.outcome.workload.config.overlap.layers):
            written = [name for name in _written(rank, layer) if name in ("gate", "up", "down")]
            seen_any = seen_any or bool(written)
            wrong = ""
            if (at := _too_early(written)) is not None:
                order = some(written[: at + 2], 6)
                sentence = f"rank {rank.rank} computes the weight gradients of layer {layer} in the order {order}"
                wrong = f"{sentence}; expected down before gate and up"
            yield Comparison(rank.rank, wrong, pairs=len(written), kind="order")
    if not seen_any:
        raise NotOffered("no gradient of an expert is written in place: the order is not seen")


def _written(rank: RankOutcome, layer: int) -> Iterator[str]:
    prefix = f"layer {layer}: "
    return (name.removeprefix(prefix) for name in seen(rank).written if name.startswith(prefix))


def _too_early(written: list[str]) -> int | None:
    """Return the position of the first write of gate or up that precedes that of down, or None."""
    done: Counter[str] = Counter()
    for at, name in enumerate(written):
        done[name] += 1
        if name != "down" and done[name] > done["down"]:
            return at
    return None


def entries_of(rank: RankOutcome, step: StepSeen) -> list[Entry]:
    """Return the collectives of a step."""
    first, end = step.calls
    return [entry for entry in rank.ledger if first <= entry.order < end]


def call_words(entry: Entry) -> str:
    """Return a collective in words: the operation, the group and the sizes."""
    return f"{entry.op} on {group_words(entry.ranks)} ({entry.bytes_in} bytes for {entry.bytes_out})"
