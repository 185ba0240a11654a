"""Judges of rows that are sent in float8: scales, values, sums of combine, and sent bytes.

The signs of a row identify its token, since rounding does not change the signs of large numbers. R rows, D hidden, B
blocks of columns under one scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_conformance.chapters.token_exchange.judge.token_exchange import Script, Token, require_dtype
from moe_conformance.chapters.token_exchange.workloads.fp8_wire import SIGNED
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, apart, fail
from moe_conformance.judging.observed.claims import claims_of
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.observed.traffic import by_phase, bytes_leaving
from moe_conformance.judging.verdict import (
    AbsentGradient,
    Costly,
    NotOffered,
    Tally,
    WrongDelivery,
    WrongForm,
    WrongGradient,
    WrongOutput,
)
from moe_conformance.reference.cost.wire_bytes import row_bytes
from moe_conformance.reference.token_exchange.wire_errors import legal_scales, legal_values, scale_bounds
from moe_conformance.reference.token_exchange.wire_formats import E4M3, E5M2, Format, block_maxima
from moe_conformance.scenarios.outcome import Outcome

EMPTY, FULL, COMBINE = 0, 1, 2  # numbers of the calls of the script
_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def judge_float8_rows(outcome: Outcome, tally: Tally) -> None:
    """Decide whether delivered rows are the tokens within the rounding of the format, with the right scales.

    Raises:
        WrongDelivery: a row is of no token, is missing, or has a scale or value beyond the rounding of its token.
        WrongForm: the sums have another dtype than the tokens.
        WrongOutput: y of a token is not the sum of its delivered rows.
        WrongGradient, AbsentGradient: the gradient of a token is not that of the sum, within the format's rounding.
    """
    script = Rounded(outcome)
    script.judge_rows(tally)
    script.judge_sums(tally)
    script.judge_gradients(tally)


@judge(Costly, "dispatch")
def judge_float8_bytes(outcome: Outcome) -> Comparisons:
    """Decide whether a rank's dispatch sends only numbers of the format, their scales, ids and weights.

    The bytes of a dispatch without tokens are subtracted, unless messages have one size and rows are sent in them.

    Raises:
        Costly: it sends more bytes.
        NotOffered: the ledgers have fewer bytes than the rows need, so that these are not sent by torch.distributed.
    """
    script = Rounded(outcome)
    D, K = outcome.workload.config.hidden, outcome.workload.config.top_k
    row = row_bytes(D, 8, script.block, top_k=K, alignment=16)
    sent: list[tuple[float, float]] = []  # by rank: the bytes of a dispatch without tokens, and with them
    for rank, seen in enumerate(sorted(outcome.ranks, key=lambda seen: seen.rank)):
        phases, moved = by_phase(seen), script.moved(rank)
        empty, full = (
            sum(bytes_leaving(entry, rank) for entry in phases[f"dispatch:{call}"]) for call in (EMPTY, FULL)
        )
        if full < moved * D:
            sentence = f"the ledger has {full:g} bytes sent by rank {rank} in dispatch; {moved} rows have to be sent"
            raise NotOffered(sentence)
        sent.append((empty, full))
    for rank, (empty, full) in enumerate(sent):
        moved = script.moved(rank)
        spent = full - empty if full - empty >= moved * D else full  # messages of one size, with or without tokens
        of_row = spent / moved if moved else math.inf
        sentence = f"rank {rank} sends {spent:g} bytes in dispatch for {moved} rows, {of_row:g} per row"
        wrong = Finding("bytes", f"{sentence}; expected at most {row} per row", (rank,))
        yield Comparison(rank, wrong if spent > moved * row else "", pairs=moved)


@dataclass(frozen=True)
class Rounded:
    """A script of one dispatch in float8 and one combine, with its expected results."""

    outcome: Outcome

    @cached_property
    def script(self) -> Script:
        """The script with rows in the dtype of the tokens."""
        return Script(self.outcome)

    @cached_property
    def fmt(self) -> Format:
        """The format that the backend claims."""
        return _FORMATS[claims_of(self.outcome.ranks).wire_format]

    @cached_property
    def block(self) -> int:
        """The number of columns that share a scale, by default all columns."""
        return claims_of(self.outcome.ranks).wire_block or self.outcome.workload.config.hidden

    @cached_property
    def sent(self) -> dict[Token, Tensor]:
        """The sent row of every token."""
        given = self.script.call(FULL).given
        return {Token(s, t): row_D for s, arguments in enumerate(given) for t, row_D in enumerate(arguments["x_TD"])}

    @cached_property
    def rows(self) -> dict[tuple[int, Token], tuple[int, Tensor]]:
        """The delivered rows by rank and the token that their signs identify: number and values."""
        owner = {_signs(row_D): token for token, row_D in self.sent.items()}
        ids, found, findings = values(self.outcome, FULL, "ids_RK"), {}, []
        for rank, rows_RD in enumerate(values(self.outcome, FULL, "rows_RD")):
            for row in (ids[rank] >= 0).any(1).nonzero().flatten().tolist():
                token = owner.get(_signs(rows_RD[row]))
                if token is None or token.source not in self.script.group_of[rank] or (rank, token) in found:
                    twice = f"is {token}, delivered twice or from a rank outside of its exchange group"
                    what = "is a row of no token" if token is None else twice
                    findings.append(Finding("signs", f"row {row} on rank {rank} {what}", (rank,)))
                else:
                    found[rank, token] = row, rows_RD[row]
        for rank, token in self.due():
            if (rank, token) not in found:
                findings.append(Finding("lost", f"{token} was not delivered to rank {rank}", (rank,)))
        if findings:
            fail(WrongDelivery, "dispatch", findings)
        return found

    def due(self) -> Iterator[tuple[int, Token]]:
        """Yield every rank and token to be delivered: the rank holds an expert of the token."""
        for rank, group in self.script.group_of.items():
            for source in group:
                at_TK = torch.isin(self.script.ids(FULL)[source], torch.tensor(self.script.held[rank]))
                yield from ((rank, Token(source, t)) for t in at_TK.any(1).nonzero().flatten().tolist())

    def moved(self, rank: int) -> int:
        """Return the number of rows that a rank has to send to others."""
        return sum(token.source == rank != to for to, token in self.due())

    # ---- judgements ------------------------------------------------------------------------------------------

    @judge(WrongDelivery, "dispatch")
    def judge_rows(self) -> Comparisons:
        """Compare scales, values, slots and counts of delivered rows with the tokens."""
        for (rank, token), (row, v_D) in self.rows.items():
            x_1D = self.sent[token].unsqueeze(0)
            scales = answers(self.outcome, FULL)[rank].values.get("scales_RB")
            scales_1B = scale_bounds(x_1D, self.block, self.fmt)[1] if scales is None else scales[row : row + 1]
            name = f"row {row} on rank {rank}, of {token}:"
            if scales_1B.shape != block_maxima(x_1D, self.block).shape:
                blocks = block_maxima(x_1D, self.block).shape[1]
                words = f"{name} {scales_1B.shape[1]} scales instead of {blocks} for blocks of {self.block}"
                raise WrongForm("dispatch", words, ranks=(rank,))
            for b in (~legal_scales(x_1D, scales_1B, self.block, self.fmt)).nonzero()[:, 1].tolist():
                low, high = (float(bound[0, b]) for bound in scale_bounds(x_1D, self.block, self.fmt))
                words = f"{name} the scale of block {b} is {float(scales_1B[0, b]):g}; expected {low:g} to {high:g}"
                yield Comparison(rank, Finding("scale", words, (rank,)))
            legal_1D = legal_values(x_1D, v_D.unsqueeze(0), scales_1B, self.block, self.fmt, unit=_unit(v_D.dtype))
            for c in (~legal_1D).nonzero()[:, 1].tolist():
                v, x = float(v_D[c]), float(x_1D[0, c])
                words = f"{name} column {c} is {v:g} instead of {x:g} within float8 rounding"
                yield Comparison(rank, Finding("value", words, (rank,), abs(v - x)))
            yield Comparison(rank, self.script.wrong_slots(FULL, rank, token, row), pairs=1, elements=len(v_D))
        yield from self.script.compare_counts(FULL)

    @judge(WrongOutput, "combine")
    def judge_sums(self) -> Comparisons:
        """Compare y with the sum of the delivered rows, within the rounding of that sum."""
        require_dtype(self.outcome, COMBINE)  # the bound is in units of this dtype: a narrower one would widen it
        for rank, y_TD in enumerate(values(self.outcome, COMBINE)):
            for t, y_D in enumerate(y_TD.double()):
                came = [v_D.double() for (_, token), (_, v_D) in self.rows.items() if token == Token(rank, t)]
                parts = torch.stack([torch.zeros_like(y_D), *came])
                error_D = len(came) * 2 * _unit(y_TD.dtype) * parts.abs().sum(0)
                right_D = ((y_D - parts.sum(0)).abs() <= error_D) | ~parts.sum(0).isfinite() & ~y_D.isfinite()
                for c in (~right_D).nonzero().flatten().tolist():
                    numbers = f"{float(y_D[c]):g} instead of {float(parts.sum(0)[c]):g}"
                    words = f"y at {Token(rank, t)}, column {c}, is {numbers}, the sum of the received rows"
                    yield Comparison(rank, Finding("sum", words, (rank,)))
                yield Comparison(rank, elements=len(y_D))

    @judge(WrongGradient, "gradient")
    def judge_gradients(self) -> Comparisons:
        """Compare a token's gradient with the upstream gradient times the number of ranks with its row.

        They are equal, or within the rounding of the format in which the backend claims to send gradients.
        """
        claimed = claims_of(self.outcome.ranks).gradient_format
        pairs = zip(self.script.copies(FULL), self.script.call(COMBINE).upstream, strict=True)
        for rank, (copies_T1, upstream) in enumerate(pairs):
            wanted_TD = copies_T1 * upstream[""].double()
            found_TD = answers(self.outcome, FULL)[rank].gradients["x_TD"]
            if found_TD is None:
                raise AbsentGradient("gradient", f"the gradient of the tokens is None on rank {rank}", ranks=(rank,))
            rounded = {name: self._within(fmt, wanted_TD, found_TD) for name, fmt in _FORMATS.items()}
            legal_TD = found_TD == wanted_TD if claimed is None else rounded[claimed]
            formats = [repr(name) for name, within_TD in rounded.items() if bool(within_TD.all())]
            design = "; a backend that quantises gradients by design claims gradient_format = "
            note = design + " or ".join(formats) if formats else ""
            for t, c in (~legal_TD).nonzero().tolist():
                numbers = " instead of ".join(apart(float(found_TD[t, c]), float(wanted_TD[t, c])))
                words = f"the gradient of {Token(rank, t)}, column {c}, is {numbers}{note}"
                yield Comparison(rank, Finding("gradient", words, (rank,)))
            yield Comparison(rank, elements=wanted_TD.numel())

    def _within(self, fmt: Format, wanted_TD: Tensor, found_TD: Tensor) -> Tensor:
        """Return a bool mask (T, D) of the gradients within the rounding of a format."""
        largest_TB = scale_bounds(wanted_TD, self.block, fmt)[1]
        return legal_values(wanted_TD, found_TD, largest_TB, self.block, fmt)


def _signs(row_D: Tensor) -> tuple[bool, ...]:
    return tuple((row_D[:SIGNED] < 0).tolist())


def _unit(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) / 2
