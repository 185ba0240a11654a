"""Judges of permute and unpermute: rows sorted by expert and padded, and back to tokens, compared row by row.

A row is identified by its values: it is the hidden state of a token, moved but not cast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.contract import Routing
from moe_conformance.judging.compare.tensors import judge_tensor, wrong
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.verdict import (
    CorruptRow,
    Tally,
    WrongCount,
    WrongDelivery,
    WrongForm,
    WrongGradient,
    WrongOutput,
    WrongWeight,
)
from moe_conformance.reference.permute.orders import Rows, expert_major, in_order
from moe_conformance.reference.permute.padded_segments import legal_counts, padding_rows, segment_starts
from moe_conformance.reference.permute.row_index import gather, scatter
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.workload import Padded

# Calls of permute and unpermute: with its own rows; with drawn rows, or its own with large numbers in padding rows.
_ROUND_TRIP, _OTHER = (0, 1), (2, 3)
_WITH_PADDING = f" with {tags.PADDING_ANSWER:g} in padding rows"


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a call of permute."""

    x_TD: Tensor
    routing: Routing
    multiple: int


def judge_permuted(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every expert's segment has the rows of its pairs first, then padding, and the right length.

    Raises:
        WrongForm: rows have another dtype or width.
        WrongCount: a segment has another length.
        CorruptRow, WrongDelivery: a row is of no token, or not of this expert.
        WrongWeight: the weight of a row is not that of its token and slot.
    """
    for call in _calls(outcome):
        rows = _read(outcome, call[0])
        tally.add(pairs=max(1, len(rows.token)), rank=0)


@judge(CorruptRow, "dispatch")
def judge_padding_rows(outcome: Outcome) -> Comparisons:
    """Decide whether every padding row within the counts is zero in every element.

    Raises:
        CorruptRow: a padding row is not zero; or the rows before it are wrong, see `judge_permuted`.
    """
    for there, _ in _calls(outcome):
        rows = _read(outcome, there)
        (rows_RD,) = values(outcome, there, "rows_RD")
        for row in (rows.source < 0).nonzero()[:, 0].tolist():
            fault = Finding("padding", f"row {row}, padding of expert {int(rows.expert[row])}, is not zero", (0,))
            yield Comparison(0, fault if bool((rows_RD[row] != 0).any()) else "", pairs=1)


@judge(WrongDelivery, "dispatch")
def judge_order(outcome: Outcome) -> Comparisons:
    """Decide whether the rows of every expert are ordered by token, then slot.

    Raises:
        WrongDelivery: two rows of an expert are in the wrong order; or a row is not of this expert.
    """
    rows = _read(outcome, 0)
    for expert, right in in_order(rows).items():
        of = rows.token[(rows.expert == expert) & (rows.source >= 0)].tolist()
        fault = f"the rows of expert {expert} are of tokens {of}, which are not in ascending order"
        yield Comparison(0, "" if right else fault)
    yield Comparison(0, pairs=max(1, len(rows.token)))


def judge_unpermuted(outcome: Outcome, tally: Tally) -> None:
    """Decide whether y of every token is the weighted sum of its pairs' rows, whatever padding rows hold.

    Raises:
        WrongForm, WrongOutput: y has another shape, dtype or value.
    """
    for there, back in _calls(outcome):
        given, rows = _arguments(outcome, there), _read(outcome, there)
        (y_TD,) = values(outcome, back)
        expected_TD = _back(given, rows, _rows_of(outcome, back, there).double(), _weights(given))
        if y_TD.dtype != given.x_TD.dtype:
            raise WrongForm("combine", f"y has the dtype {y_TD.dtype} instead of {given.x_TD.dtype}", ranks=(0,))
        what = "y" + _WITH_PADDING * _is_padded(outcome, back)
        judge_tensor(y_TD, expected_TD, tally, error=WrongOutput, stage="combine", what=what, row="token")


def judge_permutation_gradients(outcome: Outcome, tally: Tally) -> None:
    """Decide whether the gradients of tokens, rows and weights are those of the weighted sum.

    Raises:
        AbsentGradient, WrongForm, WrongGradient: a gradient is None, or has another shape or value.
    """
    for there, back in _calls(outcome):
        if not _is_padded(outcome, back):
            _judge_gradients(outcome, there, back, tally)


def judge_gradients_with_padding(outcome: Outcome, tally: Tally) -> None:
    """Decide whether large gradients in padding rows do not change those of tokens and weights.

    Raises:
        AbsentGradient, WrongForm, WrongGradient: as `judge_permutation_gradients`.
    """
    for there, back in _calls(outcome):
        if _is_padded(outcome, back):
            _judge_gradients(outcome, there, back, tally)


def _judge_gradients(outcome: Outcome, there: int, back: int, tally: Tally) -> None:
    given, rows = _arguments(outcome, there), _read(outcome, there)
    # Copies: a leaf that were the workload's own tensor would keep the gradients of every variant.
    x_TD = given.x_TD.to(torch.float64, copy=True).requires_grad_()
    weights_TK = _weights(given).clone().requires_grad_()
    round_trip = _drawn(outcome, back) is None
    drawn_RD = _rows_of(outcome, back, there).to(torch.float64, copy=True).requires_grad_()
    rows_RD = gather(x_TD, rows.token) if round_trip else drawn_RD
    y_TD = _back(given, rows, rows_RD, weights_TK)
    y_TD.backward(outcome.workload.calls[back].upstream[0][""].double())
    first, second = answers(outcome, there)[0].gradients, answers(outcome, back)[0].gradients
    compared = [("the gradient of the weights", first["routing.weights_TK"], weights_TK, "token")]
    if round_trip:
        compared.append(("the gradient of x", first["x_TD"], x_TD, "token"))
    else:
        compared.append(("the gradient of the rows", second["rows_RD"], rows_RD, "row"))
    for name, actual, leaf, row in compared:
        expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        what = name + _WITH_PADDING * _is_padded(outcome, back)
        judge_tensor(actual, expected, tally, error=WrongGradient, stage="gradient", what=what, row=row)


def _calls(outcome: Outcome) -> list[tuple[int, int]]:
    return [_ROUND_TRIP, _OTHER] if len(outcome.workload.calls) > _OTHER[0] else [_ROUND_TRIP]


def _arguments(outcome: Outcome, call: int) -> _Arguments:
    given = outcome.workload.calls[call].given[0]
    return _Arguments(given["x_TD"], given["routing"], outcome.workload.config.padding.row_multiple)


def _weights(given: _Arguments) -> Tensor:
    return given.routing.weights_TK.double()


def _rows_of(outcome: Outcome, back: int, there: int) -> Tensor:
    """Return the rows that a call of unpermute received; padding rows have no effect."""
    if (drawn_RD := _drawn(outcome, back)) is not None:
        return drawn_RD
    (rows_RD,) = values(outcome, there, "rows_RD")
    return rows_RD  # type: ignore[no-any-return]


def _drawn(outcome: Outcome, back: int) -> Tensor | None:
    """Return the rows that were drawn for a call of unpermute, None if it received the backend's own."""
    rows_RD = outcome.workload.calls[back].given[0]["rows_RD"]
    return rows_RD if isinstance(rows_RD, Tensor) else None


def _is_padded(outcome: Outcome, back: int) -> bool:
    return isinstance(outcome.workload.calls[back].given[0]["rows_RD"], Padded)


def _back(given: _Arguments, rows: Rows, rows_RD: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the expected y, from rows in the backend's order."""
    real_R = rows.source >= 0
    weights_R = torch.zeros(len(rows.token), dtype=torch.float64)
    weights_R = weights_R.index_put((real_R.nonzero()[:, 0],), weights_TK[rows.token[real_R], rows.slot[real_R]])
    return scatter(rows_RD[: len(rows.token)], rows.token, weights_R, len(given.x_TD))


def _read(outcome: Outcome, call: int) -> Rows:
    """Return the token, slot and expert of every row, in the oracle's form; raise if a row is wrong."""
    given = _arguments(outcome, call)
    (rows_RD,), (counts_E,), (weights_R,) = (
        values(outcome, call, name) for name in ("rows_RD", "counts_E", "weights_R")
    )
    if rows_RD.dtype != given.x_TD.dtype or rows_RD.shape[1:] != given.x_TD.shape[1:]:
        observed = f"{rows_RD.dtype} of shape {tuple(rows_RD.shape[1:])}"
        said = f"rows are {observed} instead of {given.x_TD.dtype} of shape {tuple(given.x_TD.shape[1:])}"
        raise WrongForm("dispatch", said, ranks=(0,))
    wanted = expert_major([given.routing.ids_TK], range(given.routing.experts))
    pairs_E = torch.bincount(wanted.expert, minlength=given.routing.experts).tolist()
    if counts_E is None and given.multiple > 1:
        raise WrongForm("dispatch", "counts_E is None although the segments are padded", ranks=(0,))
    counts = pairs_E if counts_E is None else [int(count) for count in counts_E.tolist()]
    _check_counts(counts, pairs_E, len(rows_RD), given)
    found = _found(rows_RD, counts, pairs_E, given, wanted)
    _check_weights(found, weights_R, given)
    return found


def _check_counts(counts: list[int], pairs_E: list[int], rows: int, given: _Arguments) -> None:
    if len(counts) != len(pairs_E):
        sentence = f"counts_E has {len(counts)} entries instead of {len(pairs_E)}, the number of experts"
        raise WrongCount("dispatch", sentence, ranks=(0,))
    findings = []
    for expert, right in enumerate(legal_counts(counts, pairs_E, given.multiple)):
        if not right:
            number = f"expert {expert} has {counts[expert]} rows for {pairs_E[expert]} pairs"
            findings.append(Finding("count", f"{number}, padded to a multiple of {given.multiple}", (0,)))
    if findings:
        fail(WrongCount, "dispatch", findings)
    if sum(counts) > rows:
        raise WrongCount("dispatch", f"counts_E add up to {sum(counts)}, but permute returned {rows} rows", ranks=(0,))


def _found(rows_RD: Tensor, counts: list[int], pairs_E: list[int], given: _Arguments, wanted: Rows) -> Rows:
    """Return the token of every row; slots of a token that has an expert twice are assigned in order."""
    tokens: dict[tuple[float, ...], list[int]] = {}
    for token, x_D in enumerate(given.x_TD.double().tolist()):
        tokens.setdefault(tuple(x_D), []).append(token)
    starts, padding_R = segment_starts(counts), padding_rows(counts, pairs_E)
    columns: list[tuple[int, int, int, int]] = [(-1, -1, -1, -1)] * sum(counts)
    findings: list[Finding] = []
    for expert, start in enumerate(starts):
        of_expert = wanted.expert == expert
        open_pairs = list(zip(wanted.token[of_expert].tolist(), wanted.slot[of_expert].tolist(), strict=True))
        for row in range(start, start + counts[expert]):
            columns[row] = (-1, -1, -1, expert)
            if padding_R[row]:
                continue
            alike = tokens.get(tuple(rows_RD[row].double().tolist()), [])
            pair = next((pair for pair in open_pairs if pair[0] in alike), None)
            if pair is None:
                findings.append(_stranger(row, start, expert, alike, given))
            else:
                open_pairs.remove(pair)
                columns[row] = (0, *pair, expert)
    if findings:
        fail(CorruptRow if findings[0].kind == "corrupt" else WrongDelivery, "dispatch", findings)
    return Rows(*torch.tensor(columns, dtype=torch.int64).reshape(-1, 4).T)


def _stranger(row: int, start: int, expert: int, alike: list[int], given: _Arguments) -> Finding:
    place = f"row {row}, number {row - start} of expert {expert},"
    if not alike:
        return Finding("corrupt", f"{place} is a row of no token before the padding", (0,))
    token = alike[0]
    ids = given.routing.ids_TK[token].tolist()
    twice = ", which is delivered already" if expert in ids else f", which is routed to {ids}"
    return Finding("stranger", f"{place} is token {token}{twice}", (0,))


def _check_weights(rows: Rows, weights_R: Tensor | None, given: _Arguments) -> None:
    if weights_R is None:
        return
    real_R = (rows.source >= 0).nonzero()[:, 0]
    expected_P = given.routing.weights_TK[rows.token[real_R], rows.slot[real_R]]
    if weights_R.numel() < len(rows.token):
        sentence = f"permute returned {weights_R.numel()} weights for {len(rows.token)} rows"
        raise WrongForm("dispatch", sentence, ranks=(0,))
    actual_P = weights_R.reshape(-1)[real_R]
    for at in wrong(actual_P, expected_P).nonzero()[:, 0].tolist():
        row = int(real_R[at])
        which = f"row {row}, token {int(rows.token[row])} slot {int(rows.slot[row])}, has the weight"
        sentence = f"{which} {float(actual_P[at]):g} instead of {float(expected_P[at]):g}"
        raise WrongWeight("dispatch", sentence, ranks=(0,))
