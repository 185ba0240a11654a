"""Judges of the gradients of an exchange's inputs: x and the routing weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import note_beyond
from moe_conformance.judging.comparisons import Comparisons, judge
from moe_conformance.judging.explain.block_view import Sheets
from moe_conformance.judging.explain.blocks import explain
from moe_conformance.judging.explain.microbatch_mixup import flight_words
from moe_conformance.judging.findings import Finding, count, fail, ratio_findings, some
from moe_conformance.judging.observed.ledgers import early_read
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.last_correct_stage import before_experts, last_seen_right
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import AbsentGradient, Tally, WrongForm, WrongGradient
from moe_conformance.scenarios.outcome import Grad, Microbatch


def judge_dx(reading: Reading, tally: Tally) -> None:
    """Decide whether every element of dx exactly equals the expected value; the message names the first wrong tensor.

    Raises:
        AbsentGradient: there are tokens, and their gradient is None.
        WrongGradient: an element differs.
    """
    microbatches = [m for m in range(len(reading.batches)) if reading.goes_backward(m)]
    actual = {m: _of_inputs(reading, m, "x", lambda seen: seen.dx_TD, reading.expected.dx[m]) for m in microbatches}
    sheets = Sheets(
        reading=reading,
        name="dx",
        noun="gradient",
        unit="upstream gradient",
        units={m: [batch.upstream.double() for batch in reading.batches[m]] for m in microbatches},
        actual=actual,
        expected={m: reading.expected.dx[m] for m in microbatches},
    )
    findings, ratio = explain(sheets)
    if findings:
        start, note = flight_words(reading, sheets.wrong_microbatches())
        note = f"; {last_seen_right(reading)}{note}{early_read(reading, findings)}"
        fail(WrongGradient, "gradient", findings, ratio=ratio, start=start, note=note)
    for ranks in actual.values():
        for rank, dx_TD in enumerate(ranks):
            tally.add(elements=dx_TD.numel(), rank=rank)


def judge_dweights(reading: Reading, tally: Tally) -> None:
    """Decide whether every routing weight has the gradient of its (token, slot), and empty slots have zero.

    Exact where the sum over the expert's columns is exact in the tokens' dtype in any order, elsewhere within the
    rounding of that sum (see `probe_expected.expect`).

    Raises:
        AbsentGradient: there are routed slots, and the gradient of the weights is None.
        WrongGradient: an element differs.
    """
    findings: list[Finding] = []
    wrong: set[int] = set()
    by_rank: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for m in range(len(reading.batches)):
        if not reading.goes_backward(m):
            continue
        expected, allowed = reading.expected.dweights[m], reading.expected.dweights_allowed[m]
        actual = _of_inputs(reading, m, "the weights", lambda seen: seen.dweights_TK, expected)
        for rank, (actual_TK, expected_TK, allowed_TK) in enumerate(zip(actual, expected, allowed, strict=True)):
            by_rank.setdefault(rank, []).append((actual_TK.double().flatten(), expected_TK.flatten()))
            wrong_here = _wrong_weights(reading, m, rank, actual_TK.double(), allowed_TK)
            findings += wrong_here
            note_beyond(tally, actual_TK, expected_TK, allowed_TK)
            wrong |= {m} if wrong_here else set()
            worst = ((actual_TK.double() - expected_TK).abs() / allowed_TK)[allowed_TK > 0]
            tally.add(elements=expected_TK.numel(), rank=rank, worst=float(worst.max()) if len(worst) else 0.0)
    if not findings:
        return
    what = "the gradients of the routing weights"
    sides = {rank: tuple(map(torch.cat, zip(*pairs, strict=True))) for rank, pairs in by_rank.items()}
    ratios, ratio = ratio_findings(what, sides, reading.token_ratios)  # type: ignore[arg-type]  # pairs of tensors
    explained = {rank for finding in ratios for rank in finding.ranks}
    left = [finding for finding in findings if not set(finding.ranks) & explained]
    before, (start, note) = before_experts(reading), flight_words(reading, wrong)
    note = (f"; {before}" if before else "") + note
    fail(WrongGradient, "gradient", ratios + left, ratio=ratio, start=start, note=note)


RESULTS = (judge_outputs, judge_dx, judge_dweights)  # what a step gives its tokens and weights


def judge_required_gradients(reading: Reading, tally: Tally) -> None:
    """Decide `judge_dx` or `judge_dweights` for the input that requires a gradient; the other must have none.

    Raises:
        AbsentGradient, WrongGradient: as these judges; or an input that requires no gradient has one.
    """
    _judge_absent(reading, tally)
    if "x" not in reading.outcome.workload.twist.unasked:
        judge_dx(reading, tally)
    if "weights" not in reading.outcome.workload.twist.unasked:
        judge_dweights(reading, tally)


@judge(WrongGradient, "gradient")
def _judge_absent(reading: Reading) -> Comparisons:
    """Decide whether an input that requires no gradient has none."""
    for m, ranks in enumerate(reading.batches):
        for rank in range(len(ranks)):
            seen = reading.seen(m, rank)
            for name, grad in (("x", seen.dx_TD), ("weights", seen.dweights_TK)):
                if name in reading.outcome.workload.twist.unasked and grad.value is not None:
                    sentence = f"rank {rank} microbatch {m}: {name} does not require a gradient and has one"
                    yield Finding("not required", sentence, (rank,))


def _wrong_weights(reading: Reading, m: int, rank: int, actual_TK: Tensor, allowed_TK: Tensor) -> list[Finding]:
    """Return a finding for every token of one rank whose weights have wrong gradients."""
    expected_TK = reading.expected.dweights[m][rank]
    bad_TK = ~((actual_TK - expected_TK).abs() <= allowed_TK)
    bad = bad_TK.any(1).nonzero().flatten().tolist()
    if not bad:
        return []
    if len(bad) > 1 and bool((actual_TK == actual_TK.flatten()[0]).all()):
        value = float(actual_TK.flatten()[0])
        sentence = f"the gradient of every routing weight on rank {rank} is {value:g}; expected values that differ"
        return [Finding("constant", sentence, (rank,))]
    return [_weights_finding(reading, m, rank, token, actual_TK, bad_TK[token]) for token in bad]


def _weights_finding(reading: Reading, m: int, rank: int, token: int, actual_TK: Tensor, bad_K: Tensor) -> Finding:
    expected_TK = reading.expected.dweights[m][rank]
    actual_K, expected_K = actual_TK[token], expected_TK[token]
    ids_K = reading.batches[m][rank].ids_TK[token]
    off = float(torch.nan_to_num(actual_K - expected_K, nan=torch.inf).abs().max())
    of = f" of microbatch {m}" if len(reading.batches) > 1 else ""
    name = f"the gradient of the routing weight of rank {rank} token {token}{of}"
    slot = int(bad_K.nonzero()[0])
    got = f"{float(actual_K[slot]) + 0.0:g} instead of {float(expected_K[slot]):g}"
    empty = ((ids_K < 0) & (actual_K != 0)).nonzero().flatten().tolist()
    if empty:
        sentence = f"{name} slot {empty[0]} is {float(actual_K[empty[0]]):g} instead of 0, since the slot is empty"
        return Finding("empty slot", sentence, (rank,), off)
    for by in range(1, len(expected_K)):
        if torch.equal(actual_K, expected_K.roll(by)):
            cause = f"the gradients of the token are shifted by {count(by, 'slot')}"
            sentence = f"{name} slot {slot} is {got}; likely cause: {cause}"
            return Finding("shifted", sentence, (rank,), off)
    others = (expected_TK == actual_K).all(1).nonzero().flatten().tolist()
    if others and bool(actual_K.any()):
        sentence = f"{name} slot {slot} is {got}; likely cause: it is the gradient of token {some(others)}"
        return Finding("another token's", sentence, (rank,), off)
    if float(actual_K[slot]) == 0:
        return Finding("missing", f"{name} slot {slot} (expert {int(ids_K[slot])}) is {got}", (rank,), off)
    return Finding("other", f"{name} slot {slot} (expert {int(ids_K[slot])}) is {got}", (rank,), off)


def _of_inputs(
    reading: Reading, m: int, name: str, gradient: Callable[[Microbatch], Grad], expected: tuple[Tensor, ...]
) -> list[Tensor]:
    """Return the gradient of an input on every rank; zeros where it is None and no token or slot needs it."""
    absent, misshapen, found = [], [], []
    for rank, expected_T in enumerate(expected):
        value = gradient(reading.seen(m, rank)).value
        whose = f"the gradient of {name} on rank {rank} in microbatch {m}"
        if value is None:
            needed = len(expected_T) if name == "x" else int((reading.batches[m][rank].ids_TK >= 0).sum())
            if needed:
                absent.append(Finding("absent", f"{whose} is None", (rank,)))
            value = torch.zeros_like(expected_T)
        elif value.shape != expected_T.shape:
            sentence = f"{whose} has the shape {tuple(value.shape)} instead of {tuple(expected_T.shape)}"
            misshapen.append(Finding("shape", sentence, (rank,)))
        found.append(value)
    if absent:
        note = last_seen_right(reading) if name == "x" else before_experts(reading)
        fail(AbsentGradient, "gradient", absent, note=f"; {note}" if note else "")
    if misshapen:
        fail(WrongForm, "gradient", misshapen)
    return found
