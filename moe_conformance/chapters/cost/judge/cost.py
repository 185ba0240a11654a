"""Judges of the communication of a step, from the ledgers: calls, rows of width D, and other bytes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from moe_conformance.chapters.cost.judge.claimed_wires import all_places, all_tokens, claimed_rows, smallest_rows
from moe_conformance.chapters.cost.judge.routing_maps import Map, require_maps
from moe_conformance.engine.ledger.entry import Entry, group_words
from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, judge
from moe_conformance.judging.findings import count, some
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.traffic import (
    by_phase,
    bytes_leaving,
    carries_rows,
    exchange_phases,
    rows_leaving,
)
from moe_conformance.judging.verdict import Costly, NotOffered, Tally, WrongForm
from moe_conformance.reference.cost import calls as cost_calls
from moe_conformance.reference.cost import rows as cost
from moe_conformance.reference.cost import wire_bytes
from moe_conformance.workloads.records import tags


@judge(Costly, "run")
def judge_no_calls(reading: Reading) -> Comparisons:
    """Decide whether an exchange group of one rank calls no collective, in forward and backward.

    Raises:
        Costly: it calls one.
    """
    one = "its exchange group has one rank"
    for rank in reading.ranks:
        for phase, calls in exchange_phases(rank):
            wrong = f"rank {rank.rank} calls {_words(calls)} in {phase}; expected: no collective, since {one}"
            yield Comparison(rank.rank, "" if cost_calls.legal_calls(len(calls), ranks=1) else wrong, pairs=1)


@judge(Costly, "run")
def judge_even_calls(reading: Reading) -> Comparisons:
    """Decide whether every microbatch calls equally many collectives, on all ranks of an exchange group.

    Point-to-point messages are not counted: one exchange has as many of them as are not empty.

    Raises:
        Costly: two numbers differ.
        NotOffered: the ledger has point-to-point messages only, or fewer rows than must be sent.
    """
    collectives = 0
    for group in reading.outcome.workload.layout.groups()["ep_etp"]:
        by_kind: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank in group:
            for phase, calls in exchange_phases(reading.ranks[rank]):
                number = sum(entry.sequence is not None for entry in calls)
                by_kind[phase.partition(":")[0]][phase].append(number)
                collectives += number
                yield Comparison(rank, pairs=1)
        for kind, numbers in by_kind.items():
            listed = ", ".join(f"{of_ranks} in {phase}" for phase, of_ranks in numbers.items())
            wrong = f"{kind} takes different numbers of collectives on {group_words(group)}: {listed}"
            yield Comparison(None, "" if cost_calls.same_calls(list(numbers.values())) else wrong)
    require_rows(reading)
    if not collectives:
        raise NotOffered("the ledger has no collective; point-to-point messages are not counted")


def judge_rows(reading: Reading, tally: Tally) -> None:
    """Decide whether dispatch and combine each send no more rows than the claimed wire needs.

    In a forward that calls the experts several times, they are judged together. The tally records the rows that are
    sent and the smallest possible number, whatever the verdict.

    Raises:
        Costly: one of them sends more.
        NotOffered: the ledger has fewer rows than must be sent, so that they are sent in another form; or the rows of
            the adapter's own gather are among them.
    """
    if reading.claims.wire == "copies":
        raise NotOffered("the adapter gathers tokens over tp, and its rows would be counted")
    tally.travelled = _travelled(reading)
    _judge_halves(reading, tally)


@judge(Costly, "run")
def _judge_halves(reading: Reading) -> Comparisons:
    require_rows(reading)
    for half in halves(reading):
        allowed = claimed_rows(reading, half.m, half.name, half.times)
        wrong = _excess(reading, half, allowed) if half.rows > allowed else ""
        share = 0.0 if wrong or not allowed else half.rows / allowed  # a wrong number of rows is no error within bounds
        yield Comparison(None, wrong, pairs=len(reading.ranks), worst=share)


def _excess(reading: Reading, half: Half, allowed: int) -> str:
    """Return a sentence about the rows of a half, with the claim of a wire that has as many."""
    times = cost.ratio(math.ceil(half.rows), half.times * smallest_rows(reading, half.m))
    design = ""
    for wire, rows, sent in (
        ("all", all_tokens(reading, half.m), "all tokens to all ranks by design"),
        ("capacity", all_places(reading, half.m, to_all=False), "every rank's capacity to every expert"),
        ("capacity_all", all_places(reading, half.m, to_all=True), "every rank's capacity to all ranks"),
    ):
        if half.rows == half.times * rows:
            design = f"; a backend that sends {sent} claims wire = '{wire}'"
    return f"{half.name} moves {half.rows:g} rows, {times:.3g} times the smallest number; allowed: {allowed}{design}"


@judge(Costly, "gradient")
def judge_backward_rows(reading: Reading) -> Comparisons:
    """Decide whether a backward sends no more than its forward: rows, and a number for each weight.

    No count or index is exchanged again, and the bytes of weights in forward are the most that may be sent back.

    Raises:
        Costly: it sends more.
        NotOffered: the ledger has fewer rows in forward than must be sent.
    """
    require_rows(reading)
    right = True
    for m, forward in _forwards(reading).items():
        if not reading.goes_backward(m):
            continue
        back = {rank.rank: by_phase(rank)[f"backward:{m}"] for rank in reading.ranks}
        for rank, calls in back.items():
            again = [entry for entry in calls if entry.shapes_in and "float" not in entry.dtype]
            wrong = f"backward:{m} exchanges {again[0].dtype} again on rank {rank}: {_words(again)}" if again else ""
            right &= not again
            yield Comparison(rank, wrong, pairs=1)
        floats = {rank: [entry for entry in calls if "float" in entry.dtype] for rank, calls in forward.items()}
        there, here, weights = _moved(reading, forward), _moved(reading, back), _moved(reading, floats).beside
        if reading.claims.wire == "copies":  # tp ranks with the same tokens sum gradients: no such call in forward
            weights = here.beside
        if right and not cost_calls.legal_backward(there, here, weight_bytes=weights):
            right = False
            sent = f"backward:{m} sends {here.dispatch} rows of width D and {here.beside} bytes of other data"
            yield Comparison(None, f"{sent}; forward:{m} sends {there.dispatch} rows, and weights in {weights} bytes")


@judge(Costly, "dispatch")
def judge_other_bytes(reading: Reading) -> Comparisons:
    """Decide whether the bytes of a forward, except rows, depend on ranks, experts and sent rows only.

    Where the backend reports that whole maps are sent with all tokens, the ledger must have both, a mark and a weight
    for every expert of every token, once each; in addition to them the counts alone.

    Raises:
        Costly: it sends more bytes.
        WrongForm: the reported routing is unknown, does not fit the wire, or is not what the ledger has.
        NotOffered: the ledger has fewer rows than must be sent: those in another form would count as other bytes.
    """
    config, maps = reading.outcome.workload.config, _gathers_maps(reading)
    require_rows(reading)
    W = reading.outcome.workload.layout.ep * reading.outcome.workload.layout.etp
    for m, forwards in _forwards(reading).items():
        for rank, calls in forwards.items():
            moved = _moved(reading, {rank: calls})
            rows, entry = moved.dispatch, None
            if maps:
                T = len(reading.batches[m][rank].x_TD)
                entry = require_maps(calls, rank, Map(T, config.experts, W), config.hidden, f"forward:{m}")
                rows = T * (W - 1)
            allowed = wire_bytes.metadata_bytes(W, config.experts, config.top_k, rows, map_entry=entry)
            sent = f"{moved.beside} bytes in addition to {moved.dispatch} rows"
            what = f"{allowed}, whole maps and counts" if maps else allowed
            wrong = f"rank {rank} sends {sent} in forward:{m}; allowed: {what}" if moved.beside > allowed else ""
            yield Comparison(rank, wrong, pairs=1, worst=0.0 if wrong else moved.beside / allowed)


@judge(Costly, "dispatch")
def judge_handed(reading: Reading) -> Comparisons:
    """Decide whether the experts of a rank receive no more rows than are routed to them, and padding.

    Padding is to the claimed multiple. If the backend claims to deliver all tokens, these are the limit; if it claims a
    fixed number of rows, that number is equal on all ranks of an exchange group.

    Raises:
        Costly: they receive more.
        NotOffered: the backend claims a fixed number of rows.
    """
    handed = reading.claims.handed
    if handed == "static":
        if uneven := _uneven(reading):
            raise Costly("dispatch", f"the backend claims handed = 'static', and {uneven}; expected: equally many")
        raise NotOffered("the backend claims handed = 'static', a fixed number of delivered rows")
    excess = []
    for delivered in _handed(reading, handed):
        over = delivered.rows > delivered.allowed
        excess += [delivered] if over else []
        yield Comparison(delivered.rank, delivered.sentence if over else "", pairs=1)
    if excess:
        yield Note(_by_design(reading, excess))


class _Handed(NamedTuple):
    """The rows delivered to a rank's experts in a microbatch, and the number and the limit of a claim."""

    m: int
    rank: int
    rows: int
    claimed: int
    allowed: int
    what: str  # the reason of the limit, such as "24 routed pairs"

    @property
    def sentence(self) -> str:
        start = f"rank {self.rank} delivers {self.rows} rows to its experts in microbatch {self.m}"
        return f"{start} instead of at most {self.allowed}, for {self.what}"


def _handed(reading: Reading, claimed: str) -> Iterator[_Handed]:
    """Yield the rows delivered on every rank, under a claim other than "static"."""
    for m, pairs in enumerate(reading.pairs):
        routed = Counter((pair.destination, pair.expert) for pair in pairs)
        for group in reading.outcome.workload.layout.groups()["ep_etp"]:
            tokens = sum(len(reading.batches[m][rank].x_TD) for rank in group)
            for rank in group:
                rows_N = [routed[rank, expert] for expert in reading.ranks[rank].local_experts]
                what = f"{tokens} tokens" if claimed == "tokens" else f"{sum(rows_N)} routed pairs"
                if claimed == "batched":
                    what = f"{len(rows_N)} experts with at most {max(rows_N)} routed pairs"
                    rows_N = [max(rows_N)] * len(rows_N)
                number = tokens if claimed == "tokens" else sum(rows_N)
                allowed = tokens if claimed == "tokens" else wire_bytes.most_rows(rows_N, reading.claims.multiple)
                yield _Handed(m, rank, _delivered(reading, m, rank), number, allowed, what)


_DESIGNS = {"tokens": "delivers all tokens", "batched": "pads its experts to the largest load"}


def _by_design(reading: Reading, excess: Sequence[_Handed]) -> str:
    """Return a note with the claims under which the delivered rows are right, "" if there are none."""
    note, places = "", {(delivered.m, delivered.rank) for delivered in excess}
    for claim, design in _DESIGNS.items():
        handed = list(_handed(reading, claim))
        full = all(
            delivered.rows == delivered.claimed for delivered in handed if (delivered.m, delivered.rank) in places
        )
        if full and all(delivered.rows <= delivered.allowed for delivered in handed):
            note += f"; a backend that {design} claims handed = {claim!r}"
    if zeros := sum(entry.kind == tags.PADDING for entry in reading.entries) if reading.claims.multiple == 1 else 0:
        return note or f"; {count(zeros, 'row')} of zeros are for experts: no claim excuses added tokens (PACK-03)"
    routed = {delivered.claimed for delivered in _handed(reading, "routed")}
    if not _uneven(reading) and len(routed) > 1:  # what is delivered does not follow what is routed
        note += "; a backend that delivers a fixed number of rows claims handed = 'static'"
    return note


def _uneven(reading: Reading) -> str:
    """Return a note with ranks of an exchange group that deliver different numbers of rows, "" if none do."""
    for m in range(len(reading.batches)):
        for group in reading.outcome.workload.layout.groups()["ep_etp"]:
            rows = [_delivered(reading, m, rank) for rank in group]
            if len(set(rows)) > 1:
                return f"ranks {some(group)} deliver {some(rows)} rows in microbatch {m}"
    return ""


def _delivered(reading: Reading, m: int, rank: int) -> int:
    return sum(len(call.rows_RD) for call in reading.seen(m, rank).exchange.handed)


class Half(NamedTuple):
    """Dispatch or combine of one microbatch, or both together, and the rows that it sends between ranks."""

    m: int
    name: str
    times: int  # 1, or 2 for both together
    rows: float


_HALVES = {"dispatch": ("forward", "dispatch"), "combine": ("combine", "answered")}


def halves(reading: Reading) -> Iterator[Half]:
    """Yield dispatch and combine of every microbatch; as one if the experts were called several times."""
    phases = [by_phase(rank) for rank in reading.ranks]
    for m in range(len(reading.batches)):
        rows: dict[str, float] = {}
        for half, names in _HALVES.items():
            rows[half] = 0
            for rank in reading.ranks:
                for name in names:
                    rows[half] += rows_sent(reading, phases[rank.rank].get(f"{name}:{m}", ()), rank.rank)
        if all(len(rank.microbatches[m].exchange.handed) == 1 for rank in reading.ranks):
            yield from (Half(m, f"{half}:{m}", 1, moved) for half, moved in rows.items())
        else:
            yield Half(m, f"forward:{m}", 2, sum(rows.values()))


def require_rows(reading: Reading) -> None:
    """Raise `NotOffered` if the ledger has fewer rows of width D than must be sent.

    The other rows are sent by another transport, packed together with other data, or in pieces.
    """
    for half in halves(reading):
        smallest = half.times * smallest_rows(reading, half.m)
        if half.rows < smallest:
            raise NotOffered(f"the ledger has {half.rows:g} of at least {smallest} rows of width D in {half.name}")


def _forwards(reading: Reading) -> Mapping[int, Mapping[int, Sequence[Entry]]]:
    """Return the calls of every microbatch's forward, whether split or not, by rank."""
    names = {name for half in _HALVES.values() for name in half}
    forwards: dict[int, dict[int, list[Entry]]] = {}
    for m in range(len(reading.batches)):
        forwards[m] = {rank.rank: [] for rank in reading.ranks}
        for rank in reading.ranks:
            for phase, calls in by_phase(rank).items():
                if phase in {f"{name}:{m}" for name in names}:
                    forwards[m][rank.rank] += calls
    return forwards


def rows_sent(reading: Reading, calls: Sequence[Entry], rank: int) -> float:
    """Return the number of rows of width D that a rank sends to others by some calls."""
    hidden = reading.outcome.workload.config.hidden
    return sum(rows_leaving(entry, rank, hidden) for entry in calls if carries_rows(entry, hidden))


def _moved(reading: Reading, calls_by_rank: Mapping[int, Sequence[Entry]]) -> cost_calls.Moved:
    """Return the rows and the other bytes that ranks send by calls of dispatch and combine."""
    hidden, rows, other_bytes = reading.outcome.workload.config.hidden, 0.0, 0.0
    for rank, calls in calls_by_rank.items():
        rows += rows_sent(reading, calls, rank)
        other_bytes += sum(bytes_leaving(entry, rank) for entry in calls if not carries_rows(entry, hidden))
    return cost_calls.Moved(math.ceil(rows), 0, math.ceil(other_bytes))


def _travelled(reading: Reading) -> dict[str, float]:
    """Return the rows that ranks send in all forwards, and the least: each row once there and once back."""
    config, forwards = reading.outcome.workload.config, _forwards(reading)
    least = 2 * sum(smallest_rows(reading, m) for m in forwards)
    calls: list[tuple[int, Entry]] = []
    most = 0
    for by_rank in forwards.values():
        for rank, of_rank in by_rank.items():
            calls += [(rank, entry) for entry in of_rank]
            most = max(most, len(of_rank))
    return {
        "rows": sum(rows_sent(reading, [entry], rank) for rank, entry in calls),
        "least_rows": least,
        "bytes": sum(bytes_leaving(entry, rank) for rank, entry in calls),
        "least_bytes": least * config.hidden * config.dtype.itemsize,
        "calls": most,
    }


def _gathers_maps(reading: Reading) -> bool:
    """Return whether the backend claims to send whole routing maps, which is only possible with all tokens."""
    claims = reading.claims
    if claims.routing == "maps" and claims.wire != "all":
        sentence = f"the backend claims routing = 'maps', and wire = {claims.wire!r}; expected wire = 'all'"
        raise WrongForm("dispatch", sentence)
    return claims.routing == "maps"


def _words(calls: Sequence[Entry]) -> str:
    return some([f"{entry.op} on {group_words(entry.ranks)}" for entry in calls])
