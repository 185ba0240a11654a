"""Explanations of a wrong y or dx: the cause that explains the most is tried first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moe_conformance.judging.compare.tensors import wrong
from moe_conformance.judging.explain.block_view import Sheets, WrongRow
from moe_conformance.judging.explain.microbatch_mixup import made_by_another
from moe_conformance.judging.explain.row import PADDING, explain_row, padded
from moe_conformance.judging.explain.row_order import in_another_order
from moe_conformance.judging.findings import Finding, common_ratio, likeliest, ratio_findings, ratio_words, some

_EXPLAINED = 64  # wrong rows and blocks that are described in words; more add no information


def explain(sheets: Sheets) -> tuple[list[Finding], float | None]:
    """Return findings that explain a wrong y or dx, and the factor if one factor explains all of it.

    Tried in this order: one factor, another microbatch's routing, a factor of a rank or of an expert, every row by
    itself.

    Returns no findings where nothing is wrong.
    """
    rows = list(sheets.wrong_rows())
    if not rows:
        return [], None
    by_rank = {rank: sheets.sides([rank]) for rank in range(len(sheets.reading.ranks))}
    findings, ratio = ratio_findings(sheets.name, by_rank, sheets.reading.token_ratios)
    if ratio is not None:
        return findings, ratio
    mixed_up = made_by_another(sheets)
    if mixed_up:
        return mixed_up, None
    findings += _local_part(sheets, rows)
    explained = {rank for finding in findings for rank in finding.ranks}
    rows = [row for row in rows if row.rank not in explained]
    for expert, finding in list(_ratios_of_experts(sheets, rows)):
        findings.append(finding)
        rows = [left for row in rows if (left := row.without(expert)).experts]
    rows.sort(key=lambda row: not padded(sheets, row))
    faults: list[list[Finding]] = []
    while rows and len(faults) < _EXPLAINED:
        faults += explain_row(sheets, rows.pop(0))
    causes = likeliest(faults)
    if any(finding.kind == "dropped" for finding in causes) and (moved := in_another_order(sheets)):
        return moved, None  # nothing was left out
    findings += causes
    for row in rows:
        findings.append(Finding("not explained", f"{sheets.row_name(row)} is wrong too", (row.rank,)))
    return sorted(findings, key=lambda finding: finding.kind != PADDING), None  # which explains the others


def _local_part(sheets: Sheets, rows: Sequence[WrongRow]) -> list[Finding]:
    """Find ranks whose tokens have the contributions of the experts of their rank only, and none from other ranks."""
    found = []
    for rank in sorted({row.rank for row in rows}):
        held = sheets.reading.ranks[rank].local_experts
        local_D = torch.zeros(sheets.reading.outcome.workload.config.hidden, dtype=torch.bool)
        for expert in held:
            local_D[sheets.columns(expert)] = True
        places = [(m, ranks[rank]) for m, ranks in sheets.actual.items()]
        sides = [(actual_TD, torch.where(local_D, sheets.expected[m][rank], 0.0)) for m, actual_TD in places]
        if all(not wrong(*side).any() for side in sides) and any(bool(local_TD.any()) for _, local_TD in sides):
            part = f"only this rank's part is in it: the {sheets.noun}s of its own experts {some(map(str, held))}"
            sentence = f"{sheets.name} of rank {rank} lacks every {sheets.noun} from other ranks; likely cause: {part}"
            found.append(Finding("own part", sentence, (rank,)))
    return found


def _ratios_of_experts(sheets: Sheets, rows: Sequence[WrongRow]) -> Iterator[tuple[int, Finding]]:
    """Find experts whose contribution is wrong by one factor for several tokens, and right for no token."""
    ranks = range(len(sheets.reading.ranks))
    for expert in sorted({e for row in rows for e in row.experts if e < sheets.experts}):
        blamed = [row.rank for row in rows if expert in row.experts]
        ratio = common_ratio(*sheets.sides(ranks, sheets.columns(expert)))
        if ratio is None or len(blamed) == 1 or _of_one_weight(sheets, expert, ratio):
            continue
        held = "is missing: its columns are all zero" if ratio == 0 else f"is {_words(sheets, ratio)}"
        holders = [rank.rank for rank in sheets.reading.ranks if expert in rank.local_experts]
        holder = f"held by rank {some(holders)}"
        sentence = f"every {sheets.noun} of expert {expert} ({holder}) in {sheets.name} {held}"
        yield expert, Finding("ratio of an expert", sentence, tuple(sorted(set(blamed))), abs(ratio - 1))


def _of_one_weight(sheets: Sheets, expert: int, ratio: float) -> bool:
    """Return whether all tokens of an expert share one weight, and the factor is that weight or one over it.

    Then the weights, applied twice or not at all, are a likelier cause than the expert.
    """
    weights: set[float] = set()
    for ranks in sheets.reading.batches:
        for batch in ranks:
            weights.update(batch.weights_TK[batch.ids_TK == expert].double().tolist())
    return len(weights) == 1 and ratio in {factor for weight in weights if weight for factor in (weight, 1 / weight)}


def _words(sheets: Sheets, ratio: float) -> str:
    return ratio_words(ratio, sheets.reading.token_ratios)
