"""Judges of packed sequences: cumulative lengths, which rows are tokens, and the rows of a context rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.verdict import NotOffered, WrongCount, WrongDelivery, WrongForm
from moe_conformance.reference.thd import context_shares, packed_rows, packed_sequences
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Call


@judge(WrongCount, "dispatch")
def judge_lengths(outcome: Outcome) -> Comparisons:
    """Decide whether cumulative lengths and padded lengths are those of the packed sequences.

    Raises:
        WrongForm: a list is not a list of integers with one entry more than sequences.
        WrongCount: a length changed, or a padded length is not the required multiple, or too small.
        NotOffered: all results are right, and some calls were refused.
    """
    for number, call in _offered(outcome):
        for rank, (real, padded) in enumerate(_lists(outcome, number)):
            given = call.given[rank]
            axes = {name: given[name] for name in ("tp", "cp", "sequence_parallel")}
            m = packed_sequences.length_multiple(**axes)
            wrong = packed_sequences.judge_lengths(given["lengths"], real, padded, m) == "wrong"
            words = _lengths_words(given, m, real, padded) if wrong else ""
            yield Comparison(rank, words, pairs=1 + len(given["lengths"]))
    _require_offered(outcome)


@judge(WrongCount, "dispatch")
def judge_empty_sequences(outcome: Outcome) -> Comparisons:
    """Decide whether sequences of length zero only repeat an entry in the cumulative lengths.

    Each pair of calls is without such sequences and with them.

    Raises:
        WrongForm: a list does not have one entry more than sequences.
        WrongCount: another sequence has another start than without them.
        NotOffered: all results are right, and some calls were refused.
    """
    offered = dict(_offered(outcome))
    for number in range(0, len(outcome.workload.calls), 2):
        if not {number, number + 1} <= offered.keys():
            continue
        without, within = offered[number], offered[number + 1]
        for rank, (before, after) in enumerate(zip(_lists(outcome, number), _lists(outcome, number + 1), strict=True)):
            lengths = within.given[rank]["lengths"]
            kept = [i for i, length in enumerate(lengths) if length]
            for name, one, other in zip(("cu_seqlens", "cu_seqlens_padded"), before, after, strict=True):
                rows_S = torch.zeros(len(lengths), dtype=torch.int64)
                rows_S[kept] = one.diff()
                falls = bool((rows_S < 0).any())
                wrong = int(one[0]) or falls or not torch.equal(other, packed_sequences.cumulative(rows_S.tolist()))
                full = f"without the empty sequences, of lengths {list(without.given[rank]['lengths'])}"
                words = f"{name} of lengths {list(lengths)} is {other.tolist()}; {full}, it is {one.tolist()}"
                yield Comparison(rank, words if wrong else "", pairs=len(lengths))
    _require_offered(outcome)


@judge(WrongDelivery, "dispatch")
def judge_tokens(outcome: Outcome) -> Comparisons:
    """Decide whether exactly the first L_i rows of sequence i are reported as tokens.

    Raises:
        WrongForm: the result does not have a boolean per row.
        WrongDelivery: padding is reported as a token, or a token as padding.
        NotOffered: all results are right, and some calls were refused.
    """
    for number, call in _offered(outcome):
        for rank, answer in enumerate(values(outcome, number)):
            given = call.given[rank]
            expected = packed_rows.real_rows(given["cu_seqlens"], given["cu_seqlens_padded"])
            if not isinstance(answer, Tensor) or answer.dtype != torch.bool or answer.shape != expected.shape:
                raise WrongForm("dispatch", f"the mask of tokens is {_form(answer)}; expected {len(expected)} booleans")
            lists = (
                f"cu_seqlens {given['cu_seqlens'].tolist()} in cu_seqlens_padded {given['cu_seqlens_padded'].tolist()}"
            )
            for row in (answer != expected).nonzero().flatten().tolist():
                is_not = "padding, and is reported as a token" if answer[row] else "a token, and is reported as padding"
                yield Comparison(rank, f"row {row} of {lists} is {is_not}")
            yield Comparison(rank, elements=len(expected), pairs=1)
    _require_offered(outcome)


@judge(WrongDelivery, "dispatch")
def judge_shares(outcome: Outcome) -> Comparisons:
    """Decide whether the ranks of a cp group hold every row once, in the order of chunks or as claimed.

    Raises:
        WrongForm: the result is not a list of integers.
        WrongDelivery: a row is on no rank, on several ranks, or on another rank than its chunk.
        NotOffered: all results are right, and some calls were refused.
    """
    packs: dict[tuple[int, tuple[int, ...]], dict[int, dict[int, Tensor]]] = {}
    for number, call in _offered(outcome):
        for rank, answer in enumerate(values(outcome, number)):
            given = call.given[rank]
            if not isinstance(answer, Tensor) or answer.dim() != 1 or answer.is_floating_point():
                sentence = f"the rows of a cp rank are {_form(answer)}; expected a list of row indices"
                raise WrongForm("dispatch", sentence)
            pack = given["cp"], tuple(given["cu_seqlens_padded"].tolist())
            packs.setdefault(pack, {}).setdefault(rank, {})[given["cp_rank"]] = answer
    for (cp, sums), by_rank in packs.items():
        for rank, shares in by_rank.items():
            if len(shares) < cp:  # the others were refused
                continue
            stated = outcome.ranks[rank].claims.context_order
            for words in _wrong_shares(cp, sums, [shares[c] for c in range(cp)], stated):
                yield Comparison(rank, words)
            yield Comparison(rank, elements=sums[-1], pairs=cp)
    _require_offered(outcome)


def _refused(outcome: Outcome) -> dict[int, str]:
    """Return the calls that some rank does not offer, with its error; `values` raises any other error."""
    refused = dict[int, str]()
    for number in range(len(outcome.workload.calls)):
        for answer in answers(outcome, number):
            if answer.error_by:
                refused.setdefault(number, answer.error)
    return refused


def _require_offered(outcome: Outcome) -> None:
    """Raise `NotOffered` if some calls were refused, once all others have been compared."""
    if refused := _refused(outcome):
        raise NotOffered(f"{len(refused)} calls are refused; call {min(refused)}: {refused[min(refused)]}")


def _offered(outcome: Outcome) -> Iterator[tuple[int, Call]]:
    """Return the calls that no rank refused, each with its number."""
    refused = _refused(outcome)
    return ((number, call) for number, call in enumerate(outcome.workload.calls) if number not in refused)


def _lists(outcome: Outcome, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return both cumulative lists of every rank, as int64."""
    found = []
    real, padded = (values(outcome, number, name) for name in ("cu_seqlens", "cu_seqlens_padded"))
    for rank, pair in enumerate(zip(real, padded, strict=True)):
        S = len(outcome.workload.calls[number].given[rank]["lengths"])
        for name, sums in zip(("cu_seqlens", "cu_seqlens_padded"), pair, strict=True):
            if not isinstance(sums, Tensor) or sums.is_floating_point() or sums.shape != (S + 1,):
                raise WrongForm("dispatch", f"{name} of {S} sequences is {_form(sums)}; expected {S + 1} integers")
        found.append((pair[0].long(), pair[1].long()))
    return found


def _form(answer: Any) -> str:
    return f"{answer.dtype} {tuple(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__


def _lengths_words(given: Any, m: int, real: Tensor, padded: Tensor) -> str:
    lengths = list(given["lengths"])
    words = f"of lengths {lengths} with cp = {given['cp']}, tp = {given['tp']}"
    if given["sequence_parallel"]:
        words += " and sequence parallelism"
    if real.tolist() != packed_sequences.cumulative(lengths).tolist():
        return f"cu_seqlens {words} is {real.tolist()} instead of {packed_sequences.cumulative(lengths).tolist()}"
    grown = [after - before for before, after in pairwise(padded.tolist())]
    for i, (rows, length) in enumerate(zip(grown, lengths, strict=True)):
        if rows < length:
            return f"cu_seqlens_padded {words} gives sequence {i} {rows} rows for its {length} tokens"
        if rows % m:
            return f"cu_seqlens_padded {words} gives sequence {i} {rows} rows, which is not a multiple of {m}"
    return f"cu_seqlens_padded {words} is {padded.tolist()}"


def _wrong_shares(cp: int, sums: Sequence[int], shares: Sequence[Tensor], stated: str) -> Iterator[str]:
    pack = f"cu_seqlens_padded {list(sums)} with cp = {cp}"
    if not context_shares.is_partition(shares, sums[-1]):
        held = [row for share in shares for row in share.tolist()]
        lost = sorted(set(range(sums[-1])) - set(held))
        twice = sorted({row for row in held if held.count(row) > 1})
        yield f"of {pack} rows {lost or 'none'} are on no cp rank, and rows {twice or 'none'} on several"
        return
    if stated != "mirrored":
        return
    right = context_shares.context_rows(torch.tensor(sums), cp)
    for c, (share, expected) in enumerate(zip(shares, right, strict=True)):
        if share.tolist() != expected.tolist():
            yield f"of {pack} cp rank {c} holds rows {share.tolist()} instead of {expected.tolist()}"
