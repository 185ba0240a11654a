"""Judges of delivered rows: every routed pair reaches each rank that holds its expert once, unaltered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, Start, judge
from moe_conformance.judging.explain.microbatch_mixup import dispatched_by_another, flight_words
from moe_conformance.judging.explain.row_identity import likeness
from moe_conformance.judging.findings import Finding, count
from moe_conformance.judging.observed.ledgers import early_read
from moe_conformance.judging.observed.run import Entry, Lost, Match, Reading, tokens_of
from moe_conformance.judging.verdict import CorruptRow, Tally, WrongDelivery, WrongForm
from moe_conformance.workloads.records import tags


@judge(WrongDelivery, "dispatch")
def judge_deliveries(reading: Reading) -> Comparisons:
    """Decide whether every routed pair was delivered, once, to each rank of its group that holds its expert.

    Padding rows are ignored. The pair of a row of no token counts as not delivered.

    Raises:
        WrongDelivery: pairs not delivered, delivered twice, delivered elsewhere, or delivered but not routed.
    """
    start, note = flight_words(reading, reading.matching.wrong_microbatches)
    yield from (Start(start), Note(note))
    yield from dispatched_by_another(reading) or _misdelivered(reading)
    for match in reading.matching.matches:
        yield Comparison(match.entry.rank, pairs=1)


def judge_rows(reading: Reading, tally: Tally) -> None:
    """Decide whether every row for an expert is the unaltered row of one token.

    Where weights are applied at the input the row may be scaled; `judge_weights` decides by which weight. All-zero
    rows are padding.

    Raises:
        CorruptRow: a row is of no token, or has another scale.
        WrongForm: the rows have another dtype than the tokens.
    """
    _judge_rows_dtype(reading, tally)
    _judge_tags(reading, tally)


@judge(CorruptRow, "dispatch")
def _judge_tags(reading: Reading) -> Comparisons:
    unknown = [
        Finding("row of no token", f"{entry.place} is {_row_words(reading, entry)}", (entry.rank,))
        for entry in (*reading.matching.corrupt, *reading.matching.extra)
        if entry.kind == tags.CORRUPT or not _exists(reading, entry)
    ]
    yield from unknown
    yield Note(early_read(reading, unknown))
    hidden = reading.outcome.workload.config.hidden
    for entry in (entry for entry in reading.entries if entry.kind == tags.TAG):
        if reading.applied_to(entry) != "input" and entry.scale != 1:
            sentence = f"{entry.place} is {entry.scale:g} x {entry.token_name}"
            yield Finding("scaled row", sentence, (entry.rank,), abs(entry.scale - 1))
        yield Comparison(entry.rank, elements=hidden, pairs=1)


@judge(WrongForm, "dispatch")
def _judge_rows_dtype(reading: Reading) -> Comparisons:
    wanted = reading.outcome.workload.config.dtype
    for rank in reading.ranks:
        for seen in rank.microbatches:
            dtypes = [handed.rows_RD.dtype for handed in seen.exchange.handed]
            for dtype in (dtype for dtype in dtypes if dtype != wanted):
                sentence = f"rank {rank.rank} receives rows of {dtype} instead of {wanted}, the dtype of the tokens"
                yield Finding("dtype", sentence, (rank.rank,))


def _exists(reading: Reading, entry: Entry) -> bool:
    """Return whether the workload has the token that the tag of a row names."""
    batches = reading.batches
    return (
        entry.of_microbatch < len(batches)
        and entry.source < len(batches[entry.of_microbatch])
        and entry.token < len(batches[entry.of_microbatch][entry.source].x_TD)
    )


def _row_words(reading: Reading, entry: Entry) -> str:
    rows_ND, names = tokens_of(reading, [[batch.x_TD for batch in ranks] for ranks in reading.batches])
    row_D = reading.handed(entry).rows_RD[entry.row]
    return likeness(row_D, rows_ND, names)


# ---- where rows were delivered instead -----------------------------------------------------------------------------


def _misdelivered(reading: Reading) -> Iterator[Finding]:
    """Yield findings that match missing pairs with extra rows as far as possible; each is in one finding."""
    lost, extra = list(reading.matching.lost), list(reading.matching.extra)
    for entry in [entry for entry in extra if entry.of_microbatch != entry.microbatch]:
        extra.remove(entry)
        sentence = (
            f"{entry.place} is rank {entry.source} token {entry.token} of microbatch {entry.of_microbatch} "
            f"instead of a token of microbatch {entry.microbatch}; likely cause: rows of two microbatches were mixed"
        )
        yield Finding("another microbatch", sentence, (entry.rank,))
    yield from _exchanged(lost, extra)
    for missing in list(lost):
        went = next((entry for entry in extra if _same_token(entry, missing)), None)
        if went is not None:
            lost.remove(missing)
            extra.remove(went)
            pair = missing.pair
            kind = "another rank" if went.expert == pair.expert else "another expert"
            sentence = (
                f"{_pair_name(missing)} was delivered to expert {went.expert} on rank {went.rank} "
                f"instead of expert {pair.expert} on rank {pair.destination}"
            )
            yield Finding(kind, sentence, (pair.destination, went.rank))
    delivered = _delivered(reading.matching.matches)
    for entry in extra:
        yield _superfluous(entry, delivered[_where(entry)], _elsewhere(reading, entry))
    for missing in lost:
        yield _lost_finding(reading, missing)


def _exchanged(lost: list[Lost], extra: list[Entry]) -> Iterator[Finding]:
    """Yield findings for pairs of rows that are in each other's place, and remove them from both lists."""
    for missing in list(lost):
        here = next((e for e in extra if not _same_token(e, missing) and _in_place_of(e, missing)), None)
        if here is None or missing not in lost:
            continue
        other = next((o for o in lost if o is not missing and _same_token(here, o)), None)
        there = next((e for e in extra if other and _same_token(e, missing) and _in_place_of(e, other)), None)
        if other is None or there is None:
            continue
        for done in (missing, other):
            lost.remove(done)
        for entry in (here, there):
            extra.remove(entry)
        sentence = (
            f"{_pair_name(missing)} and {_pair_name(other)} are exchanged: the first was delivered to expert "
            f"{there.expert} on rank {there.rank}, the second to expert {here.expert} on rank {here.rank}"
        )
        yield Finding("exchanged", sentence, (here.rank, there.rank))


def _superfluous(entry: Entry, times: int, elsewhere: str) -> Finding:
    if elsewhere:
        sentence = f"{entry.place} is {entry.token_name}, which was delivered to {elsewhere} too; expected: to one"
        return Finding("to two replicas", sentence, (entry.rank,))
    if times:
        sentence = (
            f"{entry.token_name} was delivered twice to expert {entry.expert} on rank {entry.rank} "
            f"(again as row {entry.row})"
        )
        return Finding("delivered twice", sentence, (entry.rank,))
    sentence = f"{entry.place} is {entry.token_name}, which is not routed to this expert"
    return Finding("not routed", sentence, (entry.rank,))


def _elsewhere(reading: Reading, entry: Entry) -> str:
    """Return the other replica of its expert to which the token of a row was delivered, "" if there is none."""
    if reading.claims.placement == "once":
        return ""
    near = next(group for group in reading.outcome.workload.layout.groups()["ep"] if entry.rank in group)
    same = (entry.microbatch, entry.source, entry.token, entry.expert)
    for other in (match.entry for match in reading.matching.matches):
        found = (other.microbatch, other.source, other.token, other.expert)
        if found == same and other.rank in near and other.rank != entry.rank:
            return f"the replica of expert {entry.expert} on rank {other.rank}"
    return ""


def _lost_finding(reading: Reading, missing: Lost) -> Finding:
    """Return a finding for a pair that was not delivered, with the rows on that rank that may be its remains."""
    pair = missing.pair
    handed = [e for e in reading.entries if e.rank == pair.destination and e.microbatch == missing.microbatch]
    here = [entry for entry in handed if entry.expert == pair.expert]
    remains = ""
    corrupt = sum(entry.kind == tags.CORRUPT for entry in here)
    zero = sum(entry.kind == tags.PADDING for entry in here)
    if corrupt:
        remains = f"; the rows delivered there include {count(corrupt, 'row')} of no token"
    elif _unassigned(reading, missing):
        remains = (
            "; likely cause: its row is among the delivered rows beyond the reported counts, which no expert receives"
        )
    elif zero:
        remains = f"; the rows delivered there include {count(zero, 'row')} of zeros"
    sentence = f"{_pair_name(missing)} was not delivered to expert {pair.expert} on rank {pair.destination}{remains}"
    return Finding("lost", sentence, (pair.destination,))


def _unassigned(reading: Reading, missing: Lost) -> bool:
    for handed in reading.seen(missing.microbatch, missing.pair.destination).exchange.handed:
        idle_RD = handed.rows_RD[(handed.ids_RJ < 0).all(1)]
        said = tags.decode(idle_RD)
        same_R = (said.rank_R == missing.pair.source) & (said.token_R == missing.pair.token)
        if bool((same_R & (said.microbatch_R == missing.microbatch)).any()):
            return True
    return False


def _pair_name(missing: Lost) -> str:
    of = f" of microbatch {missing.microbatch}" if missing.microbatch else ""
    return f"rank {missing.pair.source} token {missing.pair.token} slot {missing.pair.slot}{of}"


def _same_token(entry: Entry, missing: Lost) -> bool:
    pair = missing.pair
    return (entry.microbatch, entry.source, entry.token) == (missing.microbatch, pair.source, pair.token)


def _in_place_of(entry: Entry, missing: Lost) -> bool:
    pair = missing.pair
    return (entry.microbatch, entry.rank, entry.expert) == (missing.microbatch, pair.destination, pair.expert)


def _where(entry: Entry) -> tuple[int, ...]:
    return entry.microbatch, entry.rank, entry.expert, entry.source, entry.token


def _delivered(matches: tuple[Match, ...]) -> Counter[tuple[int, ...]]:
    return Counter(_where(match.entry) for match in matches)
