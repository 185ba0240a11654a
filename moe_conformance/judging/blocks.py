"""Saying what is wrong with y or dx, block by block.

Both are built alike: the columns of expert e in token t's row hold weight * gain(e) * unit, where the unit is the token's own
row (for y) or its upstream gradient (for dx), and zero where the token is not routed to e. So a wrong block tells
what happened to one (token, expert), whatever happened to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.judging.diagnosis import Finding, common_ratio, ratio_findings, ratio_words, some
from moe_conformance.judging.exact import wrong
from moe_conformance.judging.likeness import column_words
from moe_conformance.judging.reading import Reading
from moe_conformance.workloads import tags

Ranks = Sequence[Tensor]  # a (T, D) tensor of every rank

_PADDED = tags.PADDING_ANSWER / 32  # times the smallest weight: what no legal y or dx reaches
_EXPLAINED = 64  # wrong rows told in words; thousands of them say nothing new


@dataclass(frozen=True)
class Sheets:
    """A result of all ranks by microbatch, its oracle, and its units."""

    name: str  # "y" or "dx"
    noun: str  # what an expert contributes to it: "answer" or "gradient"
    units: Mapping[int, Ranks]
    actual: Mapping[int, Ranks]
    expected: Mapping[int, Ranks]


@dataclass(frozen=True)
class _Row:
    """One wrong row."""

    microbatch: int
    rank: int
    token: int
    experts: tuple[int, ...]  # whose blocks are wrong; E stands for the columns that belong to no expert


def explain(reading: Reading, sheets: Sheets) -> tuple[list[Finding], float | None]:
    """List what is wrong, the widest explanation first: a factor of all, of a rank, of an expert, a row, a block.

    Returns no findings where nothing is wrong; the ratio only where one factor explains all of it.
    """
    rows = list(_wrong_rows(reading, sheets))
    if not rows:
        return [], None
    wrong_ranks = sorted({row.rank for row in rows})
    by_rank = {rank: _whole(sheets, rank) for rank in range(len(reading.ranks))}
    findings, ratio = ratio_findings(sheets.name, by_rank, reading.ratio_names)
    if ratio is not None:
        return [Finding(f.kind, f.sentence, tuple(wrong_ranks), f.size) for f in findings], ratio
    told = {rank for finding in findings for rank in finding.ranks}
    rows = [row for row in rows if row.rank not in told]
    for expert, of_expert in _ratios_of_experts(reading, sheets, rows):
        findings.append(of_expert)
        rows = [_without(row, expert) for row in rows]
        rows = [row for row in rows if row.experts]
    for row in rows[:_EXPLAINED]:
        findings += _explain_row(reading, sheets, row)
    for row in rows[_EXPLAINED:]:
        findings.append(Finding("not explained", f"{_name(sheets, row)} differs too", (row.rank,)))
    return findings, None


def _wrong_rows(reading: Reading, sheets: Sheets) -> Iterator[_Row]:
    config = reading.outcome.workload.config
    width = config.hidden // config.experts
    for m, ranks in sheets.expected.items():
        for rank, expected_TD in enumerate(ranks):
            wrong_TD = wrong(sheets.actual[m][rank], expected_TD)
            if not bool(wrong_TD.any()):
                continue
            for token in wrong_TD.any(1).nonzero().flatten().tolist():
                at = wrong_TD[token].nonzero().flatten() // width
                yield _Row(m, rank, token, tuple(at.clamp_max(config.experts).unique().tolist()))


def _whole(sheets: Sheets, rank: int) -> tuple[Tensor, Tensor]:
    return (
        torch.cat([sheets.actual[m][rank].double().flatten() for m in sheets.expected]),
        torch.cat([sheets.expected[m][rank].flatten() for m in sheets.expected]),
    )


def _without(row: _Row, expert: int) -> _Row:
    return _Row(row.microbatch, row.rank, row.token, tuple(e for e in row.experts if e != expert))


def _ratios_of_experts(
    reading: Reading, sheets: Sheets, rows: Sequence[_Row]
) -> Iterator[tuple[int, Finding]]:
    """Find experts whose contribution is off by one factor for all of several tokens."""
    experts = reading.outcome.workload.config.experts
    for expert in sorted({e for row in rows for e in row.experts if e < experts}):
        hit = [row for row in rows if expert in row.experts]
        columns = _columns(reading, expert)
        places = [(m, rank) for m in sheets.expected for rank in range(len(reading.ranks))]
        actual = torch.cat([sheets.actual[m][rank][:, columns].double() for m, rank in places])
        ratio = common_ratio(actual, torch.cat([sheets.expected[m][rank][:, columns] for m, rank in places]))
        if ratio is not None and len(hit) > 1:
            sentence = f"every {sheets.noun} of expert {expert} in {sheets.name} is {ratio_words(ratio, reading.ratio_names)}"
            if ratio == 0:
                sentence = f"every {sheets.noun} of expert {expert} is missing from {sheets.name}: its columns are zero"
            yield (
                expert,
                Finding("ratio of an expert", sentence, tuple({row.rank for row in hit}), abs(ratio - 1)),
            )


# ---- one row ---------------------------------------------------------------------------------------------------------


def _explain_row(reading: Reading, sheets: Sheets, row: _Row) -> list[Finding]:
    actual_D = sheets.actual[row.microbatch][row.rank][row.token].double()
    expected_D = sheets.expected[row.microbatch][row.rank][row.token]
    off = float(torch.nan_to_num(actual_D - expected_D, nan=torch.inf).abs().max())
    if bool((actual_D.abs() >= _PADDED).sum() * 2 > len(actual_D)):
        largest = float(actual_D.abs().max())
        sentence = f"{_name(sheets, row)} holds {largest:g}: the answer to a padding row ({tags.PADDING_ANSWER:g}) reached it"
        return [Finding("padding", sentence, (row.rank,), off)]
    if len(row.experts) > 1:
        whole = _of_other_token(sheets, row, slice(None), actual_D)
        if whole is not None:
            return [Finding("another token's", f"{_name(sheets, row)} is {whole}", (row.rank,), off)]
        if not bool(actual_D.any()):
            sentence = f"{_name(sheets, row)} is zero: every {sheets.noun} was dropped"
            return [Finding("dropped", sentence, (row.rank,), off)]
    return [_explain_block(reading, sheets, row, expert) for expert in row.experts]


def _explain_block(reading: Reading, sheets: Sheets, row: _Row, expert: int) -> Finding:
    columns = _columns(reading, expert)
    actual_B = sheets.actual[row.microbatch][row.rank][row.token][columns].double()
    expected_B = sheets.expected[row.microbatch][row.rank][row.token][columns]
    batch = reading.batches[row.microbatch][row.rank]
    slots = (batch.ids_TK[row.token] == expert).nonzero().flatten().tolist()
    at = column_words(range(columns.start, columns.stop))
    if expert == reading.outcome.workload.config.experts:
        whose = "of no expert"
    elif slots:
        whose = f"slot {some(slots)}, expert {expert}"
    else:
        whose = f"expert {expert}, to which no slot is routed"
    kind, holds = _holds(reading, sheets, row, expert, slots, actual_B, expected_B)
    off = float(torch.nan_to_num(actual_B - expected_B, nan=torch.inf).abs().max())
    return Finding(kind, f"{_name(sheets, row)}, {at} ({whose}), {holds}", (row.rank,), off)


def _holds(
    reading: Reading,
    sheets: Sheets,
    row: _Row,
    expert: int,
    slots: Sequence[int],
    actual_B: Tensor,
    expected_B: Tensor,
) -> tuple[str, str]:
    """Return the kind of fault and a phrase for what a block holds instead of what is expected."""
    if not bool(torch.isfinite(actual_B).all()):
        return "not finite", "is not finite"
    if not bool(actual_B.any()):
        return "dropped", f"is zero: the {sheets.noun} of expert {expert} was dropped"
    unit_B = sheets.units[row.microbatch][row.rank][row.token][_columns(reading, expert)]
    times = common_ratio(actual_B, unit_B)
    if times is not None and expert < reading.outcome.workload.config.experts:
        weight = times / tags.gain(expert)
        if not slots:
            return (
                "not asked for",
                f"is not zero: it holds {weight:g} x what expert {expert} makes of the token itself",
            )
        return _weighted(reading, sheets, row, slots, weight)
    columns = _columns(reading, expert)
    other = _of_other_token(sheets, row, columns, actual_B)
    if other is not None:
        return "another token's", f"is {other}"
    added = _of_other_token(sheets, row, columns, actual_B - expected_B) if slots else None
    if added is not None:
        return "added", f"is its own {sheets.noun} plus {added}"
    if not slots:
        return "not asked for", f"is not zero but {_numbers(actual_B)}"
    bad = (actual_B != expected_B).nonzero().flatten().tolist()
    where = column_words([columns.start + column for column in bad])
    return "other", f"differs in {where}: {_numbers(actual_B[bad])} instead of {_numbers(expected_B[bad])}"


def _weighted(
    reading: Reading, sheets: Sheets, row: _Row, slots: Sequence[int], weight: float
) -> tuple[str, str]:
    """Explain a block that is the token's own with another weight than that of its slots."""
    of_token = reading.weights[row.microbatch][row.rank][row.token]
    own = sum(of_token[slot] for slot in slots)
    held = f"is weighted by {weight:g} instead of {own:g}"
    if weight == 2 * own:
        return "twice", f"holds the {sheets.noun} twice"
    if weight in of_token:
        return "another slot's weight", f"{held}: the weight of slot {of_token.index(weight)}"
    if weight == 1:
        return "unweighted", f"{held}: the weight was not applied"
    if weight == own * own:
        return "weighted twice", f"{held}: the weight was applied twice"
    return "another factor", f"{held}: {ratio_words(weight / own, reading.ratio_names)}"


def _of_other_token(sheets: Sheets, row: _Row, columns: slice, actual: Tensor) -> str | None:
    """Name the tokens whose expected values in these columns are the actual ones."""
    found = []
    for m, ranks in sheets.expected.items():
        for rank, expected_TD in enumerate(ranks):
            for token in (expected_TD[:, columns] == actual).all(1).nonzero().flatten().tolist():
                if (m, rank, token) != (row.microbatch, row.rank, row.token):
                    of = f" of microbatch {m}" if m != row.microbatch else ""
                    found.append(f"rank {rank} token {token}{of}")
    if not found or not bool(actual.any()):
        return None
    return f"that of {found[0]}" + (
        f" (or of {len(found) - 1} others that are alike)" if len(found) > 1 else ""
    )


def _columns(reading: Reading, expert: int) -> slice:
    """Return the columns of an expert's block; of expert E, those that are left over."""
    config = reading.outcome.workload.config
    width = config.hidden // config.experts
    return slice(expert * width, config.hidden if expert == config.experts else (expert + 1) * width)


def _name(sheets: Sheets, row: _Row) -> str:
    of = f" of microbatch {row.microbatch}" if len(sheets.expected) > 1 else ""
    return f"{sheets.name} of rank {row.rank} token {row.token}{of}"


def _numbers(values: Tensor) -> str:
    return some(f"{value:g}" for value in values.tolist())
