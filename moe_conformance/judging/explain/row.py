"""Explanations of one wrong row of y or dx: as a whole if one cause explains it, else block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.judging.explain.block_view import Ranks, Sheets, WrongRow
from moe_conformance.judging.explain.row_identity import column_words
from moe_conformance.judging.findings import Finding, common_ratio, ratio_words, some
from moe_conformance.workloads.records import tags

PADDING = "padding"  # a kind of fault that appears wherever rows are in the wrong place
_PADDED = tags.PADDING_ANSWER / 32  # exceeds any correct y or dx, even times the smallest weight


_Held = tuple[str, str]  # the kind of fault, and a phrase


@dataclass(frozen=True)
class _Piece:
    """Some columns of a wrong row."""

    sheets: Sheets
    row: WrongRow
    columns: slice
    expert: int | None = None  # None: the whole row

    def of(self, sheet: Mapping[int, Ranks]) -> Tensor:
        """Return the columns of this row from one of the sheets."""
        return sheet[self.row.microbatch][self.row.rank][self.row.token, self.columns].double()

    @property
    def actual(self) -> Tensor:
        return self.of(self.sheets.actual)

    @property
    def expected(self) -> Tensor:
        return self.of(self.sheets.expected)

    @property
    def unit(self) -> Tensor:
        return self.of(self.sheets.units)

    def finding(self, kind: str, words: str) -> Finding:
        off = float(torch.nan_to_num(self.actual - self.expected, nan=torch.inf).abs().max())
        return Finding(kind, f"{self.sheets.row_name(self.row)}{words}", (self.row.rank,), off)


def explain_row(sheets: Sheets, row: WrongRow) -> list[list[Finding]]:
    """Return for each fault of a row the findings that may explain it, for `likeliest`.

    Padding, values that are not finite, another token's row and zero are tried for the whole row, everything else
    by block.
    """
    whole, faults = _Piece(sheets, row, slice(None)), list[list[Finding]]()
    if padded(sheets, row):
        largest = float(whole.actual.abs().max())
        cause = f"it includes the expert output of a padding row ({tags.PADDING_ANSWER:g})"
        return [[whole.finding(PADDING, f" holds {largest:g}; likely cause: {cause}")]]
    if len(row.experts) > 1:
        if not bool(torch.isfinite(whole.actual).any()):
            return [[whole.finding("not finite", " is not finite")]]
        if not bool(whole.actual.any()):
            return [[whole.finding("dropped", f" is zero; likely cause: every {sheets.noun} was left out")]]
        exchanged = _exchanged(whole)
        if exchanged is not None:
            return [[whole.finding("exchanged", f" is that of {exchanged}, which has the value of this one")]]
        other = _another_tokens(whole)
        if other is not None:
            return [[whole.finding("another token's", f" is {other}")]]
    answered = list(_answered_by_others(whole))
    for finding, experts in answered:
        for expert in experts:
            row = row.without(expert)
        faults.append([finding])
    return faults + [_explain_block(_Piece(sheets, row, sheets.columns(expert), expert)) for expert in row.experts]


def _answered_by_others(whole: _Piece) -> Iterator[tuple[Finding, tuple[int, int]]]:
    """Yield each block that is zero while one of an unselected expert is not, with the weight of the first."""
    sheets, row = whole.sheets, whole.row
    batch = sheets.reading.batches[row.microbatch][row.rank]
    pieces = {e: _Piece(sheets, row, sheets.columns(e), e) for e in row.experts if e < sheets.experts}
    strange = [e for e, block in pieces.items() if not bool(block.expected.any()) and bool(block.actual.any())]
    for expert, block in pieces.items():
        slots = (batch.ids_TK[row.token] == expert).nonzero().flatten().tolist()
        if not slots or bool(block.actual.any()):
            continue
        weight = float(batch.weights_TK[row.token, slots].double().sum())
        alike = [e for e in strange if common_ratio(pieces[e].actual, pieces[e].unit) == weight * tags.gain(e)]
        if alike:
            strange.remove(alike[0])
            what = f"{sheets.noun} of expert {alike[0]} in place of that of expert {expert}"
            cause = f"slot {some(map(str, slots))} was computed by another expert"
            words = f" holds the {what}, with its weight; likely cause: {cause}"
            yield whole.finding("answered by another", words), (expert, alike[0])


def padded(sheets: Sheets, row: WrongRow) -> bool:
    """Return whether the expert output of a padding row reached a row: most of it is larger than any correct value."""
    actual_D = _Piece(sheets, row, slice(None)).actual
    large_D = actual_D.abs() >= _PADDED
    return bool(large_D.sum() * 2 > len(large_D)) and bool(torch.isfinite(actual_D).all())


def _explain_block(block: _Piece) -> list[Finding]:
    assert block.expert is not None
    at, slots = block_words(block.sheets, block.row, block.expert), _slots(block.sheets, block.row, block.expert)
    return [block.finding(kind, f", {at}, {holds}") for kind, holds in _held(block, slots)]


def block_words(sheets: Sheets, row: WrongRow, expert: int) -> str:
    """Return the name of an expert's block in a row: its columns, and whether a slot is routed to the expert."""
    slots, columns = _slots(sheets, row, expert), sheets.columns(expert)
    if expert == sheets.experts:
        whose = "no expert's"
    elif slots:
        whose = f"slot {some(slots)}, expert {expert}"
    else:
        whose = f"expert {expert}, to which no slot is routed"
    return f"{column_words(range(columns.start, columns.stop))} ({whose})"


def _slots(sheets: Sheets, row: WrongRow, expert: int) -> list[int]:
    ids_K = sheets.reading.batches[row.microbatch][row.rank].ids_TK[row.token].tolist()
    return [slot for slot, routed in enumerate(ids_K) if routed == expert]


def _held(block: _Piece, slots: Sequence[int]) -> list[_Held]:
    """Return what a block may hold instead of the expected values, likeliest first."""
    noun, expert = block.sheets.noun, block.expert
    if not bool(torch.isfinite(block.actual).all()):
        return [("not finite", "is not finite")]
    if not bool(block.actual.any()):
        return [("dropped", f"is zero; likely cause: the {noun} of expert {expert} was left out")]
    held = []
    exchanged = _exchanged(block)
    if exchanged is not None:
        held.append(("exchanged", f"is that of {exchanged}, which has the value of this one"))
    weighted, factor = _weighted(block, slots)
    held += weighted
    other = None if exchanged else _another_tokens(block)
    if other is not None:
        held.append(("another token's", f"is {other}"))
    added = _names(block.sheets, _alike(block, block.sheets.expected, block.actual - block.expected))
    if slots and added:
        held.append(("added", f"is its own {noun} plus that of {added}"))
    return held or [factor or _unlike(block, slots)]


def _unlike(block: _Piece, slots: Sequence[int]) -> _Held:
    """Return the values of a block for which no other explanation was found."""
    if not slots:
        return "not asked for", f"is not zero but {_numbers(block.actual)}"
    bad = (block.actual != block.expected).nonzero().flatten().tolist()
    where = column_words([block.columns.start + column for column in bad])
    return "other", f"differs in {where}: {_numbers(block.actual[bad])} instead of {_numbers(block.expected[bad])}"


def _weighted(block: _Piece, slots: Sequence[int]) -> tuple[list[_Held], _Held | None]:
    """Explain a block that is the token's unit times another weight; if no weight fits, by the bare factor."""
    reading, row, noun, expert = block.sheets.reading, block.row, block.sheets.noun, block.expert
    times = common_ratio(block.actual, block.unit)
    if times is None or expert is None or expert >= block.sheets.experts:
        return [], None
    weight = times / tags.gain(expert)
    if not slots:
        words = f"is not zero: it holds {weight:g} x the output of expert {expert} for this token"
        return [("not asked for", words)], None
    of_token = reading.weights[row.microbatch][row.rank][row.token]
    right = sum(of_token[slot] for slot in slots)
    held, by = [], f"is multiplied by {weight:g} instead of {right:g}"
    if weight in of_token:
        held.append(("another slot's weight", f"{by}; likely cause: the weight of slot {of_token.index(weight)}"))
    if weight == 1:
        held.append(("unweighted", f"{by}; likely cause: the weight was not applied"))
    if weight == right * right:
        held.append(("weighted twice", f"{by}; likely cause: the weight was applied twice"))
    if weight == 2 * right:
        held.append(("twice", f"holds the {noun} twice"))
    factor = f": {ratio_words(weight / right, reading.token_ratios)}" if right else ""
    return held, ("another factor", f"{by}{factor}")


# ---- other tokens ------------------------------------------------------------------------------------------------

_ALIKE = 3  # in blocks of few columns, a match with more tokens than this is chance

_Place = tuple[int, int, int]  # (microbatch, rank, token)


def _exchanged(piece: _Piece) -> str | None:
    """Return the name of the token that holds the values expected here, while its values are here; else None."""
    sheets = piece.sheets
    swapped = [
        (m, rank, token)
        for m, rank, token in _alike(piece, sheets.expected, piece.actual)
        if torch.equal(sheets.actual[m][rank][token, piece.columns].double(), piece.expected)
    ]
    return _names(sheets, swapped)


def _another_tokens(piece: _Piece) -> str | None:
    """Return the name of the token whose values, or whose unit with this token's weights, these are; else None."""
    same = _names(piece.sheets, _alike(piece, piece.sheets.expected, piece.actual))
    if same:
        return f"that of {same}"
    if not bool((piece.expected != 0).any()) or not bool((piece.unit != 0).all()):
        return None
    factor_D = piece.expected / piece.unit  # weight * gain in every column, exact since both have few bits
    made = _names(piece.sheets, _alike(piece, piece.sheets.units, piece.actual, factor_D))
    return f"made of the {piece.sheets.unit} of {made}" if made else None


def _alike(piece: _Piece, sheet: Mapping[int, Ranks], actual: Tensor, factor: Tensor | float = 1.0) -> list[_Place]:
    """Return the other tokens whose values in a sheet, times the factor, equal the actual ones."""
    if not bool(actual.any()):
        return []
    here = (piece.row.microbatch, piece.row.rank, piece.row.token)
    found: list[_Place] = []
    for m, ranks in sheet.items():
        for rank, values_TD in enumerate(ranks):
            equal_T = (values_TD[:, piece.columns] * factor == actual).all(1)
            found += [(m, rank, token) for token in equal_T.nonzero().flatten().tolist() if (m, rank, token) != here]
    return found


def _names(sheets: Sheets, places: Sequence[_Place]) -> str | None:
    if not 0 < len(places) <= _ALIKE:
        return None
    return " or ".join(sheets.token_name(*place) for place in places)


def _numbers(values: Tensor) -> str:
    return some(f"{value:g}" for value in values.tolist())
