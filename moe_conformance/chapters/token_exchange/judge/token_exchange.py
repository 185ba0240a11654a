"""Judges of the fused token exchange: delivered rows, with a new or an earlier handle, and sums of combine.

The signs of rows are tags (see `records.tags`), so that each row identifies its token, also after rounding. R rows
received, K slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_conformance.judging.compare.tensors import wrong
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, apart, count
from moe_conformance.judging.observed.script import answers, judge_refused, values
from moe_conformance.judging.shared.exchange.expert_placement import judge_placement
from moe_conformance.judging.verdict import (
    AbsentGradient,
    ChangedInput,
    Stage,
    Tally,
    WrongDelivery,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.reference.token_exchange.combine_rules import combine
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.workload import Answered, Call, Ref


class Token(NamedTuple):
    """The source rank and the number of a token of a dispatch."""

    source: int
    token: int

    def __str__(self) -> str:
        """Return the name of the token, as messages write it."""
        return f"rank {self.source} token {self.token}"


def judge_reuse(outcome: Outcome, tally: Tally) -> None:
    """Decide whether dispatches with an earlier handle deliver the new values at the earlier rows' positions.

    Raises:
        WrongDelivery: a row is another token's than that of the first dispatch, or not its new value; or the first
            dispatch itself did not deliver every token once to each rank that has an expert of it.
        WrongOutput: a combine does not return the sum of its token's rows.
        WrongGradient, AbsentGradient: the gradient of a token is not that of the sum.
        ChangedInput: a call changed its input.
    """
    script = Script(outcome)
    for number in script.dispatches:
        if script.first(number) == number:
            script.judge_fresh(tally, number)
    for number in script.dispatches:
        if script.first(number) != number:
            script.judge_again(tally, number)
    script.judge_sums(tally)
    script.judge_arguments(tally)


def judge_other_handle(outcome: Outcome, tally: Tally) -> None:
    """Decide whether combines with another dispatch's handle are refused on all ranks, and later calls are right.

    Raises:
        Unrefused: some ranks accepted it.
        WrongOutput, WrongGradient, AbsentGradient: a later combine with the right handle is not right.
        ChangedInput: a call changed its input.
    """
    script = Script(outcome)
    for number, call in enumerate(outcome.workload.calls):
        if call.may_raise:
            asked = f"the rows of call {_of(call, 'rows_RD')} with the handle of call {_of(call, 'handle')}"
            judge_refused(outcome, number, tally, stage="combine", asked=asked)
    script.judge_sums(tally)
    script.judge_arguments(tally)


def judge_biases(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every bias is added once to each token, and has the gradient of the output.

    Raises:
        WrongOutput, WrongGradient, AbsentGradient: an output or a gradient of a bias is wrong.
        ChangedInput: a call changed its input.
    """
    script = Script(outcome)
    script.judge_sums(tally)
    for number, call in enumerate(outcome.workload.calls):
        for name in call.differentiable:
            if call.method == "combine":
                expected = [upstream[""] for upstream in call.upstream]
                script.judge_gradients(tally, number, name, expected, f"{name} of call {number}")
    script.judge_arguments(tally)


@dataclass(frozen=True)
class Script:
    """A script of dispatches and combines, and its expected results."""

    outcome: Outcome

    @cached_property
    def dispatches(self) -> tuple[int, ...]:
        """The numbers of the calls that dispatch."""
        return tuple(n for n, call in enumerate(self.outcome.workload.calls) if call.method == "dispatch")

    @cached_property
    def group_of(self) -> dict[int, tuple[int, ...]]:
        """The exchange group of every rank."""
        return {rank: group for group in self.outcome.workload.layout.groups()["ep_etp"] for rank in group}

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The global ids of every rank's experts, by rank; every expert is held by some rank.

        Raises:
            WrongGroups: as `judge_placement`.
        """
        judge_placement(self.outcome, Tally())
        return tuple(rank.local_experts for rank in sorted(self.outcome.ranks, key=lambda rank: rank.rank))

    def call(self, number: int) -> Call:
        """Return a call by its number."""
        return self.outcome.workload.calls[number]

    def first(self, number: int) -> int:
        """Return the dispatch whose layout a dispatch uses, which may be itself."""
        return _of(self.call(number), "handle", number)

    def ids(self, number: int) -> list[Tensor]:
        """Return the ids_TK that a dispatch used, by rank."""
        return [given["ids_TK"] for given in self.call(self.first(number)).given]

    def copies(self, number: int) -> list[Tensor]:
        """Return the number of ranks that each token is sent to, (T, 1), by source rank."""
        return [
            torch.stack([_holds(ids_TK, self.held[to]) for to in self.group_of[rank]]).double().sum(0).unsqueeze(1)
            for rank, ids_TK in enumerate(self.ids(number))
        ]

    # ---- rows ------------------------------------------------------------------------------------------------

    def rows(self, number: int) -> Iterator[tuple[int, int, Token | None, Tensor]]:
        """Yield every row of a dispatch that is for an expert: its rank, number, token and values."""
        ids = values(self.outcome, number, "ids_RK")
        for rank, rows_RD in enumerate(values(self.outcome, number, "rows_RD")):
            if len(rows_RD) != len(ids[rank]):
                sentence = f"call {number}: rank {rank} receives {len(rows_RD)} rows, and ids of {len(ids[rank])} rows"
                raise WrongForm("dispatch", sentence, ranks=(rank,))
            if rows_RD.dtype != (dtype := self.outcome.workload.config.dtype):
                received = f"call {number}: rank {rank} receives rows of {rows_RD.dtype}"
                sentence = f"{received} instead of {dtype}, the dtype of the tokens"
                raise WrongForm("dispatch", sentence, ranks=(rank,))
            said = tags.decode(rows_RD.sign())
            for row in (ids[rank] >= 0).any(1).nonzero().flatten().tolist():
                known = said.kind_R[row] == tags.TAG and int(said.microbatch_R[row]) == number
                token = Token(int(said.rank_R[row]), int(said.token_R[row])) if known else None
                yield rank, row, token, rows_RD[row]

    @judge(WrongDelivery, "dispatch")
    def judge_fresh(self, number: int) -> Comparisons:
        """Require every token once, with its slots, on every rank of its group that holds one of its experts."""
        found: dict[tuple[int, Token], int] = {}
        call = self.call(number)
        for rank, row, token, row_D in self.rows(number):
            what = ""
            if token is None:
                what = "is a row of no token"
            elif not torch.equal(row_D, self._sent(number, token)):
                what = f"is {token}, but {unlike(row_D, self._sent(number, token))}"
            elif found.setdefault((rank, token), row) != row:
                what = f"is {token}, which is delivered in row {found[rank, token]} already"
            if what:
                yield Comparison(rank, Finding("row", f"call {number}: row {row} on rank {rank} {what}", (rank,)))
        for rank, group in self.group_of.items():
            for source in group:
                for t in range(len(call.given[source]["ids_TK"])):
                    at = found.pop((rank, Token(source, t)), None)
                    yield Comparison(rank, self.wrong_slots(number, rank, Token(source, t), at), pairs=1)
        for rank, token in found:
            sentence = f"call {number}: {token} was delivered to rank {rank}, outside of its group"
            yield Comparison(rank, Finding("extra", sentence, (rank,)))
        yield from self.compare_counts(number)

    def _sent(self, number: int, token: Token) -> Tensor:
        row_D: Tensor = self.call(number).given[token.source]["x_TD"][token.token]
        return row_D

    def _slots(self, rank: int, ids_K: Tensor, weights_TK: Tensor | None, t: int) -> list[tuple[int, float]]:
        """Return the local expert and weight of every slot of a token that is routed to a rank."""
        held = self.held[rank]
        weights = [0.0] * len(ids_K) if weights_TK is None else weights_TK[t].tolist()
        return sorted((held.index(e), w) for e, w in zip(ids_K.tolist(), weights, strict=True) if e in held)

    def _received(self, number: int, rank: int, row: int) -> list[tuple[int, float]]:
        answer = answers(self.outcome, number)[rank].values
        ids = answer["ids_RK"][row].tolist()
        weights = answer.get("weights_RK")
        carried = [0.0] * len(ids) if weights is None else weights[row].tolist()
        return sorted((e, w) for e, w in zip(ids, carried, strict=True) if e >= 0 or w)  # other rows have no weight

    def wrong_slots(self, number: int, rank: int, token: Token, row: int | None) -> str | Finding:
        """Return what is wrong with a token's experts and weights on a rank; row is None if it was not delivered."""
        given = self.call(number).given[token.source]
        expected = self._slots(rank, given["ids_TK"][token.token], given.get("weights_TK"), token.token)
        got = [] if row is None else self._received(number, rank, row)
        return _slots_finding(number, rank, token, expected, got) if expected != got else ""

    def compare_counts(self, number: int) -> Comparisons:
        """Yield a fault for every rank that reports other numbers of slots than are routed to its experts."""
        for rank, counts in enumerate(values(self.outcome, number, "counts_N")):
            slots = [int(e) for s in self.group_of[rank] for e in self.ids(number)[s].flatten()]
            true = [slots.count(e) for e in self.held[rank]]
            if counts is not None and counts.tolist() != true:
                reported = f"call {number}: rank {rank} reports the counts {counts.tolist()} instead of {true}"
                yield Comparison(rank, Finding("counts", reported, (rank,)))

    @judge(WrongDelivery, "dispatch")
    def judge_again(self, number: int) -> Comparisons:
        """Require the new value of each token at its row in the first dispatch, and the ids of the first dispatch."""
        first = self.first(number)
        there = {(rank, row): token for rank, row, token, _ in self.rows(first) if token is not None}
        here = {(rank, row): (token, row_D) for rank, row, token, row_D in self.rows(number)}
        for (rank, row), wanted in there.items():
            token, row_D = here.pop((rank, row), (None, torch.empty(0)))
            if token != wanted or not torch.equal(row_D, self._sent(number, wanted)):
                said = f"{'a row of no token of it' if token is None else token} instead of {wanted}"
                if token == wanted:
                    said = f"{token}, but {unlike(row_D, self._sent(number, wanted))}"
                sentence = f"call {number}: row {row} on rank {rank} is {said}; call {first} had {wanted} there"
                yield Comparison(rank, Finding("moved", sentence, (rank,)))
            else:
                yield Comparison(rank, pairs=1, elements=row_D.numel())
        for rank, row in here:
            sentence = f"call {number}: row {row} on rank {rank} is beyond the rows of call {first}"
            yield Comparison(rank, Finding("more", sentence, (rank,)))
        for name in ("ids_RK", "counts_N"):
            pairs = zip(values(self.outcome, first, name), values(self.outcome, number, name), strict=True)
            for rank, (before, now) in enumerate(pairs):
                if before is not None and now is not None and not torch.equal(before, now):
                    sentence = f"call {number}: {name} on rank {rank} differ from those of call {first}"
                    yield Comparison(rank, Finding(name, sentence, (rank,)))

    # ---- sums ------------------------------------------------------------------------------------------------

    @property
    def combines(self) -> Iterator[tuple[int, Call, int]]:
        """Yield every combine with a valid handle: its number, the call, and the dispatch whose rows it sums."""
        for number, call in enumerate(self.outcome.workload.calls):
            if call.method == "combine" and not call.may_raise:
                yield number, call, _of(call, "rows_RD")

    @property
    def answers(self) -> Iterator[tuple[int, Call, int]]:
        """Yield every combine of expert outputs: its number, the call, and the dispatch that the experts received."""
        for number, call in enumerate(self.outcome.workload.calls):
            if isinstance(rows := call.given[0].get("rows_RD"), Answered):
                yield number, call, rows.rows_RD.call

    def judge_sums(self, tally: Tally) -> None:
        """Require that every combine returns the sum of its tokens' rows and biases, with its gradients."""
        for number, call, rows in self.combines:
            expected = []
            for copies_T1, sent, given in zip(self.copies(rows), self.call(rows).given, call.given, strict=True):
                expected.append(_added_up(copies_T1 * sent["x_TD"].double(), given.get("biases", ())))
            self.judge_output(tally, number, expected)
        for number, call, rows in self.combines:
            pairs = zip(self.copies(rows), call.upstream, strict=True)
            wanted = [copies_T1 * upstream[""].double() for copies_T1, upstream in pairs]
            name = f"the gradient of x_TD of dispatch (call {rows}) through combine (call {number})"
            self.judge_gradients(tally, rows, "x_TD", wanted, name)

    @judge(WrongOutput, "combine")
    def judge_output(self, number: int, expected: Sequence[Tensor]) -> Comparisons:
        """Require the output of a combine, in the dtype of the tokens."""
        require_dtype(self.outcome, number)
        yield from _compare(values(self.outcome, number), expected, f"y of call {number}", "combine")

    @judge(WrongGradient, "gradient")
    def judge_gradients(self, number: int, argument: str, expected: Sequence[Tensor], name: str) -> Comparisons:
        """Require the gradient of an argument of a call."""
        found = [answer.gradients[argument] for answer in answers(self.outcome, number)]
        if absent := [rank for rank, gradient in enumerate(found) if gradient is None]:
            raise AbsentGradient("gradient", f"{name} is None on rank {absent[0]}", ranks=tuple(absent))
        yield from _compare(found, expected, name, "gradient")

    @judge(ChangedInput, "run")
    def judge_arguments(self) -> Comparisons:
        """Require that no call changed its input."""
        for number, call in enumerate(self.outcome.workload.calls):
            for rank, answer in enumerate(answers(self.outcome, number)):
                inputs = ", ".join(answer.changed)
                sentence = f"{call.method} of call {number} changed its input {inputs} on rank {rank}"
                yield Comparison(rank, sentence if answer.changed else "", pairs=1)


def _compare(found: Sequence[Any], expected: Sequence[Tensor], name: str, stage: Stage) -> Comparisons:
    """Yield whether every token's row of a result is right, rank by rank; raise `WrongForm` if the shape is not."""
    for rank, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        if actual.shape != wanted.shape:
            sentence = f"{name} has the shape {tuple(actual.shape)} instead of {tuple(wanted.shape)} on rank {rank}"
            raise WrongForm(stage, sentence, ranks=(rank,))
        for t in wrong(actual, wanted).any(1).nonzero().flatten().tolist():
            column = int(wrong(actual, wanted)[t].nonzero()[0])
            was, should = float(actual[t, column]), float(wanted[t, column])
            sentence = f"{name} at {Token(rank, t)}, column {column}, is {' instead of '.join(apart(was, should))}"
            yield Comparison(rank, Finding("value", sentence, (rank,), abs(was - should)))
        yield Comparison(rank, elements=wanted.numel())


def require_dtype(outcome: Outcome, number: int) -> None:
    """Raise `WrongForm` unless the output of a combine has the dtype of the tokens."""
    dtype = outcome.workload.config.dtype
    for rank, y_TD in enumerate(values(outcome, number)):
        if y_TD.dtype != dtype:
            sentence = f"y of call {number} has the dtype {y_TD.dtype} instead of {dtype} on rank {rank}"
            raise WrongForm("combine", sentence, ranks=(rank,))


def _of(call: Call, argument: str, default: int = -1) -> int:
    """Return the number of the call that an argument comes from, the same on all ranks."""
    ref = call.given[0].get(argument)
    return ref.call if isinstance(ref, Ref) else default


def unlike(row_D: Tensor, sent_D: Tensor) -> str:
    """Return a description of the first element in which a row differs from the token that was sent."""
    column = int((row_D != sent_D).nonzero()[0])
    values = " instead of ".join(apart(float(row_D[column]), float(sent_D[column])))
    return f"with {values} in column {column}"


def _added_up(rows_TD: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """Return the sum of every token's rows, which have no weights, and its biases, as combine computes it."""
    only_T1 = torch.zeros(len(rows_TD), 1, dtype=torch.int64)
    return combine(rows_TD.unsqueeze(1), only_T1, torch.ones(len(rows_TD), 1), biases)


def _holds(ids_TK: Tensor, experts: Sequence[int]) -> Tensor:
    return torch.isin(ids_TK, torch.tensor(experts)).any(1)


def _slots_finding(number: int, rank: int, token: Token, expected: list[Any], got: list[Any]) -> Finding:
    if not got:
        lost = f"call {number}: {token} was not delivered to rank {rank}"
        sentence = (
            f"{lost}, to which {count(len(expected), 'slot')} of it {'is' if len(expected) == 1 else 'are'} routed"
        )
        return Finding("lost", sentence, (rank,))
    if not expected:
        sentence = f"call {number}: {token} was delivered to rank {rank}, which has none of its experts"
        return Finding("extra", sentence, (rank,))
    delivered = f"call {number}: {token} was delivered to rank {rank} with local experts and weights"
    sentence = f"{delivered} {got} instead of {expected}"
    return Finding("slots", sentence, (rank,))
