"""Explanation of expert contributions that all reached other tokens: rows in another order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from moe_conformance.judging.explain.block_view import Sheets, WrongRow
from moe_conformance.judging.explain.row import block_words
from moe_conformance.judging.findings import Finding, some
from moe_conformance.workloads.records import tags

_LARGEST = 64  # contributions of an expert that are searched for; all pairs of them are tried

_Key = tuple[float, ...]  # the values of an expert's block of a unit; several tokens may have the same


@dataclass(frozen=True)
class _Missing:
    """The contribution of an expert to a token whose block is wrong."""

    row: WrongRow
    key: _Key
    weight: float


def in_another_order(sheets: Sheets) -> list[Finding]:
    """Return a finding per wrong block with the contribution that it holds, if every missing one is at another token.

    The contributions have either all the weights of the tokens that hold them, or all those of the tokens that they are
    for. Returns nothing where rows were not delivered as they were sent, where most tokens have another token's whole
    row, and where some missing contribution is not found.
    """
    matching = sheets.reading.matching
    if matching.lost or matching.extra or matching.corrupt:
        return []
    blocks: dict[tuple[int, int], list[WrongRow]] = {}
    rows = list(sheets.wrong_rows())
    if 2 * sum(_is_anothers(sheets, row) for row in rows) > len(rows):
        return []
    for row in rows:
        for expert in row.experts:
            blocks.setdefault((row.microbatch, expert), []).append(row)
    return _found(sheets, blocks, of_holder=True) or _found(sheets, blocks, of_holder=False)


def _is_anothers(sheets: Sheets, row: WrongRow) -> bool:
    actual_D = sheets.actual[row.microbatch][row.rank][row.token].double()
    return any(bool((expected_TD == actual_D).all(1).any()) for expected_TD in sheets.expected[row.microbatch])


def _found(sheets: Sheets, blocks: Mapping[tuple[int, int], Sequence[WrongRow]], *, of_holder: bool) -> list[Finding]:
    found: dict[WrongRow, list[Finding]] = {row: [] for rows in blocks.values() for row in rows}
    for (_, expert), wrong in blocks.items():
        missing = list(_missing(sheets, expert, wrong))
        if len(missing) > _LARGEST:
            return []
        held = _assigned({row: _options(sheets, row, expert, missing, of_holder) for row in wrong}, missing)
        if held is None:
            return []
        for row, keys in held.items():
            found[row] += [_block_finding(sheets, row, expert, keys, missing)] if keys else []
    return [finding for row in sheets.wrong_rows() for finding in found[row]]


def _assigned(
    options: Mapping[WrongRow, Sequence[tuple[_Key, ...]]], missing: Sequence[_Missing]
) -> dict[WrongRow, tuple[_Key, ...]] | None:
    """Choose one option per block, fewest options first, so that each missing contribution is used once."""
    left, held = Counter(contribution.key for contribution in missing), {}
    for row in sorted(options, key=lambda row: len(options[row])):
        fitting = next((keys for keys in options[row] if Counter(keys) <= left), None)
        if fitting is None:
            return None
        held[row] = fitting
        left -= Counter(fitting)
    return None if left else held


def _missing(sheets: Sheets, expert: int, rows: Sequence[WrongRow]) -> Iterator[_Missing]:
    """Yield the contributions of an expert to the rows in which its block is wrong."""
    for row in rows:
        ids_TK = sheets.reading.batches[row.microbatch][row.rank].ids_TK
        for slot in (ids_TK[row.token] == expert).nonzero().flatten().tolist():
            key = tuple(_block(sheets.units, sheets, row, expert).tolist())
            yield _Missing(row, key, sheets.reading.weights[row.microbatch][row.rank][row.token][slot])


def _options(
    sheets: Sheets, row: WrongRow, expert: int, missing: Sequence[_Missing], of_holder: bool
) -> list[tuple[_Key, ...]]:
    """Return the contributions that a block may be made of, at most two per option."""
    actual = _block(sheets.actual, sheets, row, expert)
    if not bool(actual.any()):
        return [()]
    weights = {weight for weight in sheets.reading.weights[row.microbatch][row.rank][row.token] if weight}
    parts = {
        (contribution.key, weight): torch.tensor(contribution.key, dtype=torch.float64) * (weight * tags.gain(expert))
        for contribution in missing
        for weight in (weights if of_holder else (contribution.weight,))
    }
    whole: list[tuple[_Key, ...]] = [(key,) for (key, _), part in parts.items() if torch.equal(part, actual)]
    return whole or [
        (one, other)
        for ((one, _), part), ((other, _), rest) in combinations_with_replacement(parts.items(), 2)
        if torch.equal(part + rest, actual)
    ]


def _block_finding(
    sheets: Sheets, row: WrongRow, expert: int, keys: Sequence[_Key], missing: Sequence[_Missing]
) -> Finding:
    whose = []
    for key in keys:
        tokens = [contribution.row for contribution in missing if contribution.key == key]
        names = [
            sheets.token_name(contribution.microbatch, contribution.rank, contribution.token) for contribution in tokens
        ]
        whose.append(f"the {sheets.noun} for {' or '.join(names) if len(names) <= 3 else some(names)}")
    order = "rows came back in another order than they were sent"
    if sheets.noun == "gradient":
        order = "gradients came back in another order than the rows were sent"
    at = block_words(sheets, row, expert)
    sentence = f"{sheets.row_name(row)}, {at}, is {' plus '.join(whose)}; likely cause: {order}"
    return Finding("another order", sentence, (row.rank,))


def _block(sheet: Mapping[int, Sequence[Tensor]], sheets: Sheets, row: WrongRow, expert: int) -> Tensor:
    return sheet[row.microbatch][row.rank][row.token, sheets.columns(expert)].double()
