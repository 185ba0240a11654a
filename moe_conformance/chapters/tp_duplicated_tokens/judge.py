"""Judges of tokens that every rank of a tp group holds: delivered once, counted once, results on every rank.

All judges of exchanges are applied to the tokens of one tp rank, as if the other tp ranks had none. The tags of rows
name the lowest rank of the tp group, so its batches are the expected deliveries. y and the gradients of the other tp
ranks are judged in turn in place of those of the lowest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from moe_conformance.chapters.tp_duplicated_tokens.workloads import MISMATCHES, mismatch_of, odd_one_of
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, some
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.script import answers, judge_no_slip
from moe_conformance.judging.shared.exchange.counts import judge_counts
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx, judge_required_gradients
from moe_conformance.judging.shared.exchange.misuse import judge_y, wrong_call
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.experts.experts import (
    judge_expert_dweights,
    judge_expert_dx,
    judge_expert_gradients,
    judge_expert_outputs,
)
from moe_conformance.judging.verdict import (
    AbsentGradient,
    Mismatch,
    Tally,
    Unrefused,
    WrongDelivery,
    WrongForm,
    WrongOutput,
    in_turn,
)
from moe_conformance.reference.exchange.deliveries import Pair
from moe_conformance.reference.tp_duplicated_tokens import copies_agree, gathered, same_bytes, wrong_pairs
from moe_conformance.scenarios.outcome import Grad, Microbatch, Outcome
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.workload import Batch

Judge = Callable[[Reading, Tally], None]


@dataclass(frozen=True)
class Distinct(Reading):
    """A reading in which only the lowest rank of every tp group has tokens.

    A pair may be sent to the owners of its expert in any exchange group that holds the token, and must be in one.
    """

    @cached_property
    def pairs(self) -> tuple[tuple[Pair, ...], ...]:
        """The expected deliveries; of several exchange groups that hold a token, in those that the backend selected."""
        rows = Counter(
            (e.microbatch, e.rank, e.source, e.token, e.expert)
            for e in self.entries
            if e.kind == tags.TAG and e.of_microbatch == e.microbatch
        )
        return tuple(tuple(self._expected_pairs(m, rows)) for m in range(len(self.batches)))

    def _expected_pairs(self, m: int, rows: Counter[tuple[int, int, int, int, int]]) -> Iterator[Pair]:
        layout = self.outcome.workload.layout.groups()
        for copies in layout["tp"]:
            source = min(copies)
            groups = [group for group in layout["ep_etp"] if set(group) & set(copies)]
            for token, ids_K in enumerate(self.batches[m][source].ids_TK.tolist()):
                for slot, expert in enumerate(ids_K):
                    if expert < 0:
                        continue
                    before = ids_K[:slot].count(expert)  # slots of the same expert have one row each
                    owners = self._owners(expert, groups)
                    if not owners:
                        where = f"an exchange group that holds the tokens of rank {source}"
                        raise WrongDelivery("dispatch", f"expert {expert} is on no rank of {where}")
                    reached = [[r for r in ranks if rows[m, r, source, token, expert] > before] for ranks in owners]
                    complete = any(got == ranks for got, ranks in zip(reached, owners, strict=True))
                    for ranks in reached if complete else owners[:1]:
                        yield from (Pair(source, token, slot, expert, rank) for rank in ranks)

    def _owners(self, expert: int, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the ranks of every exchange group that hold an expert, without groups in which none does."""
        owners = []
        for group in groups:
            owners.append([rank for rank in group if expert in self.ranks[rank].local_experts])
        return [ranks for ranks in owners if ranks]


def judge_copies_delivered(reading: Reading, tally: Tally) -> None:
    """Decide whether every pair is delivered once in one exchange group, and at most once in every other.

    Raises:
        WrongDelivery: pairs not delivered, delivered twice, delivered elsewhere, or delivered but not routed.
        CorruptRow, WrongForm: a row is of no token, or of another dtype.
    """
    distinct = _of_copy(reading, 0)
    judge_deliveries(distinct, tally)
    judge_rows(distinct, tally)
    layout = reading.outcome.workload.layout.groups()
    for m, batches in enumerate(reading.batches):
        found = [_sent(match.pair, layout) for match in distinct.matching.matches if match.entry.microbatch == m]
        held = [rank.local_experts for rank in reading.ranks]
        ids = [batch.ids_TK for batch in batches]
        if wrong := wrong_pairs(ids, found, layout["ep_etp"], held, layout["tp"]):
            words = [f"rank {rank} token {token} slot {slot}" for rank, token, slot in wrong]
            sentence = f"of the tokens held by all tp ranks were not delivered exactly once: {some(words)}"
            raise WrongDelivery("dispatch", sentence)


def _sent(pair: Pair, layout: dict[str, tuple[tuple[int, ...], ...]]) -> Pair:
    """Return the pair as sent by the tp rank in the exchange group that delivered it."""
    copies = next(group for group in layout["tp"] if pair.source in group)
    there = next(group for group in layout["ep_etp"] if pair.destination in group)
    return replace(pair, source=min(set(copies) & set(there)))


def judge_copies_claimed(reading: Reading, tally: Tally) -> None:
    """Decide whether reported counts are those of the delivered rows, and of the routing of distinct tokens.

    Raises as `judge_counts`.
    """
    judge_counts(_of_copy(reading, 0), tally)


def judge_copies_counted(reading: Reading, tally: Tally) -> None:
    """Decide whether experts end with the gradient over distinct tokens, each counted once.

    Raises as `judge_expert_gradients`.
    """
    judge_expert_gradients(_of_copy(reading, 0), tally)


def judge_results_of_copies(reading: Reading, tally: Tally) -> None:
    """Decide whether y and gradients with the suite's experts are right on every tp rank, and y bitwise equal.

    Raises:
        WrongForm, WrongOutput, WrongGradient, AbsentGradient: as the judges of one rank; y differs between tp ranks.
        MalformedClaim: ranks claim different `copies`.
    """
    _judge_equal_outputs(reading, tally)
    _judge_every_copy(reading, tally, (judge_outputs, judge_dx, judge_dweights))


def judge_required_gradients_of_copies(reading: Reading, tally: Tally) -> None:
    """Decide `judge_required_gradients` for duplicated tokens: gradients if only x or only the weights require one.

    Raises as `judge_required_gradients`.
    """
    _judge_every_copy(reading, tally, (judge_required_gradients,))


def judge_expert_results_of_copies(reading: Reading, tally: Tally) -> None:
    """Decide `judge_results_of_copies` for the backend's own experts, within rounding.

    Raises as `judge_results_of_copies`.
    """
    _judge_equal_outputs(reading, tally)
    _judge_every_copy(reading, tally, (judge_expert_outputs, judge_expert_dx, judge_expert_dweights))


@judge(WrongOutput, "combine")
def _judge_equal_outputs(reading: Reading) -> Comparisons:
    """Decide whether y of all ranks of a tp group has the same bytes."""
    for m in range(len(reading.batches)):
        for copies in reading.outcome.workload.layout.groups()["tp"]:
            seen = [reading.seen(m, rank) for rank in copies]
            if missing := [rank for rank, of_copy in zip(copies, seen, strict=True) if of_copy.y is None]:
                raise WrongForm("combine", f"y of rank {missing[0]} in microbatch {m} is None", ranks=tuple(missing))
            found = [of_copy.y for of_copy in seen if of_copy.y is not None]
            for rank, y_TD in zip(copies[1:], found[1:], strict=True):
                if not same_bytes([found[0], y_TD]):
                    both = f"y of rank {rank} differs from that of rank {copies[0]}, which holds the same tokens"
                    yield Finding("copies differ", f"{both}{_where(found[0], y_TD)}", (rank,))
                yield Comparison(rank, elements=y_TD.numel())


def _where(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.shape != other.shape or one.dtype != other.dtype:
        return f": {tuple(other.shape)} of {other.dtype} instead of {tuple(one.shape)} of {one.dtype}"
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    differ = (one.contiguous().view(bits) != other.contiguous().view(bits)).nonzero()
    if not len(differ):
        return ""  # a change of the oracle of equal bytes, by which it is seen to decide, may bring two equal tensors
    t, d = differ[0].tolist()
    return f": token {t} has {float(other[t, d])!r} instead of {float(one[t, d])!r} in column {d}"


def _judge_every_copy(reading: Reading, tally: Tally, judges: tuple[Judge, ...]) -> None:
    for copy in range(reading.outcome.workload.layout.tp):
        view = _of_copy(reading, copy)
        try:
            for judge_copy in judges:
                judge_copy(view, tally)
        except Mismatch as found:
            if not copy:
                raise
            groups = reading.outcome.workload.layout.groups()["tp"]
            renamed = {min(group): group[copy] for group in groups}
            ranks = tuple(renamed.get(rank, rank) for rank in found.ranks)
            start = f"on tp rank {copy}, for every token; tp rank 0 is correct: "
            raise found.retold(start=start, ranks=ranks) from None


def _of_copy(reading: Reading, copy: int) -> Distinct:
    """Return the reading with tokens on the lowest rank of every tp group only, and the results of one tp rank."""
    outcome = reading.outcome
    source = {min(group): group for group in outcome.workload.layout.groups()["tp"]}
    batches, of_ranks = [], []
    for of_microbatch in reading.batches:
        kept = (batch if rank in source else _without_tokens(batch) for rank, batch in enumerate(of_microbatch))
        batches.append(tuple(kept))
    for rank in reading.ranks:
        seen = [_nothing(microbatch) for microbatch in rank.microbatches]
        if rank.rank in source:
            seen = [_taken(reading, m, source[rank.rank], copy) for m in range(len(seen))]
        of_ranks.append(replace(rank, microbatches=tuple(seen)))
    workload, ranks = replace(outcome.workload, batches=tuple(batches)), tuple(of_ranks)
    return Distinct(replace(outcome, workload=workload, ranks=ranks), ranks)


def _taken(reading: Reading, m: int, copies: tuple[int, ...], copy: int) -> Microbatch:
    """Return the microbatch of the first tp rank with the output and the gradients of another."""
    seen = [reading.seen(m, rank) for rank in copies]
    mine = seen[copy]
    return replace(
        seen[0],
        y=mine.y,
        y_shape=mine.y_shape,
        y_dtype=mine.y_dtype,
        dx_TD=_gradient(reading, copies, copy, f"x in microbatch {m}", [of_copy.dx_TD for of_copy in seen]),
        dweights_TK=_gradient(reading, copies, copy, f"the weights in microbatch {m}", [e.dweights_TK for e in seen]),
    )


def _gradient(reading: Reading, copies: tuple[int, ...], copy: int, name: str, by_copy: list[Grad]) -> Grad:
    """Return a tp rank's gradient, or the sum over the tp ranks if the backend claims that these are parts.

    A part must be zero, not None, if a tp rank adds nothing: the sum needs all parts.
    """
    if reading.claims.copies == "complete":
        return by_copy[copy]
    values = [grad.value for grad in by_copy if grad.value is not None]
    absent = [rank for rank, grad in zip(copies, by_copy, strict=True) if grad.value is None]
    if absent and any(value.numel() for value in values):
        ranks = some(f"rank {rank}" for rank in absent)
        sentence = f"the gradient of {name} is None on {ranks}, while other tp ranks have a part of it"
        raise AbsentGradient("gradient", sentence, ranks=tuple(absent))
    if not values or len({value.shape for value in values}) > 1:
        return by_copy[copy]
    (whole,) = gathered(values, "parts")
    return Grad(whole)


def _nothing(seen: Microbatch) -> Microbatch:
    """Return the microbatch of a rank without tokens; the rows that its experts received are kept."""

    def none(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value[:0]

    shape = (0, *seen.y_shape[1:])
    dx, dweights = Grad(none(seen.dx_TD.value)), Grad(none(seen.dweights_TK.value))
    return replace(seen, y=none(seen.y), y_shape=shape, dx_TD=dx, dweights_TK=dweights)


def _without_tokens(batch: Batch) -> Batch:
    return Batch(batch.x_TD[:0], batch.ids_TK[:0], batch.weights_TK[:0], batch.upstream[:0])


# ---- routings that differ within a tp group ------------------------------------------------------------------------


def judge_mismatch(outcome: Outcome, tally: Tally) -> None:
    """Decide whether all ranks of a tp group raise if their routings differ, between two valid steps.

    Ranks of other groups may raise or return, but none may hang.

    Raises:
        Unrefused: a rank of such a group accepted the routings.
        Hung, Died, Raised: a rank waits for another or ended, or a valid step raised.
        WrongOutput: y of a valid step is wrong.
    """
    number = wrong_call(outcome.workload)
    valid = (partial(judge_y, outcome, tally, right) for right in (number - 1, number + 1))
    in_turn([partial(_judge_mismatch, outcome, tally, number), *valid])


def _judge_mismatch(outcome: Outcome, tally: Tally, number: int) -> None:
    what, _ = MISMATCHES[mismatch_of(outcome.workload)]
    judge_no_slip(outcome, number)
    found = answers(outcome, number)
    ids = [given["routing"].ids_TK for given in outcome.workload.calls[number].given]
    groups = [group for group in outcome.workload.layout.groups()["tp"] if not copies_agree(ids, [group])]
    answered = [rank for group in groups for rank in group if not found[rank].raised]
    if answered:
        on = some(odd_one_of(outcome.workload, group) for group in groups)
        words = some(f"rank {rank}" for rank in answered)
        accepted = f"step accepted {what} (on rank {on} only of its tp group)"
        sentence = f"{accepted} on {words}; expected: an error on every rank of the tp group"
        raise Unrefused("dispatch", sentence, ranks=tuple(answered))
    for rank in (rank for group in groups for rank in group):
        tally.add(pairs=1, rank=rank)
