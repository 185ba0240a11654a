"""Judges of gradients at the delivered rows: at the experts' output (backward of combine) and at their input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_conformance.judging.comparisons import Comparisons, judge
from moe_conformance.judging.explain.row_identity import likeness
from moe_conformance.judging.findings import Finding, count, fail, ratio_findings
from moe_conformance.judging.observed.row_gradients_compared import (
    Compared,
    compare_out_gradients,
    compare_rows_gradients,
)
from moe_conformance.judging.observed.run import Reading, tokens_of
from moe_conformance.judging.shared.exchange.last_correct_stage import last_seen_right
from moe_conformance.judging.verdict import AbsentGradient, Tally, WrongGradient
from moe_conformance.scenarios.outcome import Handed
from moe_conformance.workloads.records import tags

_EXPLAINED = 24  # number of wrong rows that get a sentence each
_DESIGN = (
    "; a backend that divides gradients by ep in the backward of combine, and multiplies them in that of dispatch, "
    "claims expert_gradients = 'mean_over_ep'"
)


def judge_out_gradients(reading: Reading, tally: Tally) -> None:
    """Decide whether the backward of combine gives each delivered row exactly its token's upstream gradient.

    The gradient is multiplied by the routing weight where combine applies it. At padding rows for an expert any finite
    gradient is right. Rows for no expert are ignored.

    Raises:
        AbsentGradient: the experts' output for a token's row has no gradient.
        WrongGradient: an element differs, or the gradient at a padding row is not finite.
    """
    _require_present(
        reading, lambda handed: handed.out_grad_RD, "reached the experts' output; likely cause: combine detached it"
    )
    compared = compare_out_gradients(reading)
    _judge(reading, tally, compared, "the gradients at the experts' output", prefix="backward of combine: ")
    _judge_padding(reading, tally)


@judge(WrongGradient, "gradient")
def _judge_padding(reading: Reading) -> Comparisons:
    for entry in reading.entries:
        grad_RD = reading.handed(entry).out_grad_RD if entry.kind == tags.PADDING else None
        if grad_RD is not None and not bool(torch.isfinite(grad_RD[entry.row]).all()):
            yield Finding("padding", f"the gradient at {entry.place}, a padding row, is not finite", (entry.rank,))


def judge_rows_gradients(reading: Reading, tally: Tally) -> None:
    """Decide whether each token's row has the right gradient at the experts' input, before backward of dispatch.

    The gradient is gain * part * upstream in the columns of the row's experts, times the weight unless that was applied
    at the input.

    Raises:
        AbsentGradient: a token's row was delivered detached.
        WrongGradient: an element differs.
    """
    _require_present(reading, lambda handed: handed.rows_grad_RD, "reached the experts' input", last_seen_right)
    compared = compare_rows_gradients(reading)
    _judge(reading, tally, compared, "the gradients at the experts' input", note=last_seen_right)


def _judge(
    reading: Reading,
    tally: Tally,
    compared: Sequence[Compared],
    what: str,
    *,
    prefix: str = "",
    note: Callable[[Reading], str] | None = None,
) -> None:
    bad = [c for c in compared if c.wrong]
    if not bad:
        for c in compared:
            tally.add(elements=c.expected_ND.shape[1], pairs=1, rank=c.match.entry.rank)
        return
    by_rank = {}
    for rank in sorted({c.match.entry.rank for c in compared}):
        of_rank = [c for c in compared if c.match.entry.rank == rank]
        by_rank[rank] = torch.stack([c.actual_D for c in of_rank]), torch.stack([c.expected_D for c in of_rank])
    findings, ratio = ratio_findings(what, by_rank, reading.token_ratios)
    explained = {rank for finding in findings for rank in finding.ranks}
    left = [c for c in bad if c.match.entry.rank not in explained]
    findings += [_row_finding(reading, c, what) for c in left[:_EXPLAINED]]
    design = _DESIGN if ratio == 1 / reading.outcome.workload.layout.ep else ""
    findings += [
        Finding("not explained", "the gradient of another row is wrong", (c.match.entry.rank,))
        for c in left[_EXPLAINED:]
    ]
    findings = [Finding(f.kind, prefix + f.sentence, f.ranks, f.size) for f in findings]
    order = "; likely cause: gradients came back in another order than the rows were sent" if _moved(left) else ""
    ends = order + (f"; {note(reading)}" if note else "") + design
    fail(WrongGradient, "gradient", findings, ratio=ratio, note=ends)


def _moved(bad: Sequence[Compared]) -> bool:
    """Return whether wrong rows have the expected gradients of other wrong rows, each once, up to their weights."""
    sides = [(_unweighted(row.actual_D), _unweighted(row.expected_D)) for row in bad]
    held, expected_rows = Counter(actual for actual, _ in sides), Counter(expected for _, expected in sides)
    of_other_tokens = sum(actual != right for actual, right in sides)  # equal: of another slot of the token
    return None not in held and held == expected_rows and 2 * of_other_tokens > len(sides)


def _unweighted(row_D: Tensor) -> tuple[float, ...] | None:
    """Return a row divided by its largest element; None if the row is zero or not finite."""
    row_D = row_D.double()
    largest = row_D[row_D.abs().argmax()]
    return tuple((row_D / largest).tolist()) if bool(largest) and bool(row_D.isfinite().all()) else None


def _row_finding(reading: Reading, compared: Compared, what: str) -> Finding:
    pair, entry = compared.match
    upstream_ND, names = tokens_of(reading, [[batch.upstream for batch in ranks] for ranks in reading.batches])
    if what.endswith("input"):  # only the columns of the row's experts matter
        inside_D = compared.expected_D != 0
        upstream_ND = upstream_ND * inside_D * tags.gain(entry.expert) * reading.parts[entry.rank]
    of = f" of microbatch {entry.microbatch}" if len(reading.batches) > 1 else ""
    held = likeness(compared.actual_D, upstream_ND, names)
    expected = likeness(compared.expected_D, upstream_ND, names)
    sentence = (
        f"{what}, rank {pair.source} token {pair.token} slot {pair.slot}{of} (expert {entry.expert} on rank "
        f"{entry.rank}, row {entry.row}), in terms of upstream gradients: {held}; expected: {expected}"
    )
    off = float(torch.nan_to_num(compared.actual_D.double() - compared.expected_D, nan=torch.inf).abs().max())
    return Finding("row", sentence, (entry.rank,), off)


def _require_present(
    reading: Reading,
    gradient: Callable[[Handed], Tensor | None],
    words: str,
    note: Callable[[Reading], str] | None = None,
) -> None:
    backward = {m for m in range(len(reading.batches)) if reading.goes_backward(m)}
    absent = Counter(
        match.entry.rank
        for match in reading.matching.matches
        if match.entry.microbatch in backward and gradient(reading.handed(match.entry)) is None
    )
    findings = [
        Finding("absent", f"no gradient of {count(rows, 'token row')} on rank {rank} {words}", (rank,), rows)
        for rank, rows in absent.items()
    ]
    if findings:
        fail(AbsentGradient, "gradient", findings, note=f"; {note(reading)}" if note else "")
