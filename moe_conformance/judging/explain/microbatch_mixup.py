"""Explanations of microbatches that were mixed up: which were in flight together, and whose routing was used."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.judging.explain.block_view import Sheets
from moe_conformance.judging.findings import Finding, count
from moe_conformance.judging.observed.probe_expected import blocks
from moe_conformance.judging.observed.run import Reading
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.schedule import FORWARD_ALONE, most_open
from moe_conformance.workloads.records.workload import Batch


def flight_words(reading: Reading, wrong: Collection[int]) -> tuple[str, str]:
    """Return the start and the end of a sentence about wrong microbatches that were in flight with others.

    Both are empty if the wrong microbatches were not in flight with others. Only the start is not empty if one of those
    in flight is right, since a fault that has nothing to do with the others would show in all of them; else the end.
    """
    together = _together(reading.outcome.workload.schedule)
    if not set(wrong) & set(together):
        return "", ""
    words = f"microbatches {' and '.join(map(str, sorted(together)))} were in flight at the same time"
    right = sorted(set(together) - set(wrong))
    if not right:
        return "", f" ({words})"
    return f"{words}, of which {' and '.join(map(str, right))} {'are' if right[1:] else 'is'} correct: ", ""


def _together(schedule: str) -> frozenset[int]:
    """Return the largest set of microbatches in flight at one time; empty if they run one after the other.

    >>> sorted(_together("F0 F1 B0 B1")), sorted(_together("F0 B0 S F1 B1"))
    ([0, 1], [])
    """
    most = most_open(schedule, {"forward", "dispatch", "combine", "repeat"}, {"backward", *FORWARD_ALONE})
    return most if len(most) > 1 else frozenset()


# ---- whose routing was used ----------------------------------------------------------------------------------------


def dispatched_by_another(reading: Reading) -> list[Finding]:
    """Find wrong microbatches that were delivered by another one's routing; nothing if one of them was not."""
    matching = reading.matching
    found: dict[int, set[tuple[int, ...]]] = {m: set() for m in range(len(reading.batches))}
    for entry in reading.entries:
        if entry.kind == tags.TAG and entry.of_microbatch == entry.microbatch:
            found[entry.microbatch].add((entry.rank, entry.expert, entry.source, entry.token))
    expected = [{(p.destination, p.expert, p.source, p.token) for p in pairs} for pairs in reading.pairs]
    findings = []
    for m in sorted(matching.wrong_microbatches):
        used = [other for other in range(len(expected)) if other != m and found[m] and expected[other] == found[m]]
        if not used:
            return []
        lost = [missing.pair for missing in matching.lost if missing.microbatch == m]
        sentence = f"microbatch {m} was dispatched by the routing of microbatch {used[0]}"
        ranks = tuple(sorted({pair.source for pair in lost} | {pair.destination for pair in lost}))
        findings.append(
            Finding("another routing", f"{sentence}; {count(len(lost), 'pair')} of its own were not delivered", ranks)
        )
    return findings


def made_by_another(sheets: Sheets) -> list[Finding]:
    """Find microbatches whose values follow the routing of another one; nothing if that leaves a fault unexplained.

    The other microbatch may differ, the way in which the routing was mixed up (see `_ways`) is the same for all.
    """
    wrong: dict[int, dict[int, list[int]]] = {}  # tokens by microbatch and rank
    for row in sheets.wrong_rows():
        wrong.setdefault(row.microbatch, {}).setdefault(row.rank, []).append(row.token)
    used: dict[int, dict[str, int]] = {m: {} for m in wrong}  # other microbatch that explains all ranks, by the way
    for m, ranks in wrong.items():
        for other in sheets.expected:
            fitting = [_fitting(sheets, m, rank, other) for rank in ranks] if other != m else [[]]
            for words in fitting[0]:
                if all(words in ways for ways in fitting):
                    used[m].setdefault(words, other)
    for words in next(iter(used.values()), {}):
        if all(words in ways for ways in used.values()):
            return [_mixup_finding(sheets, m, wrong[m], words.format(other=used[m][words])) for m in sorted(wrong)]
    return []


def _mixup_finding(sheets: Sheets, m: int, wrong: Mapping[int, Sequence[int]], words: str) -> Finding:
    words = words.replace("NOUN", sheets.noun).replace("UNIT", sheets.unit)
    rank, tokens = next(iter(wrong.items()))
    at = f"it is wrong at {count(sum(map(len, wrong.values())), 'token')}, the first is rank {rank} token {tokens[0]}"
    return Finding(
        "another routing", f"{sheets.name} of microbatch {m} is wrong; likely cause: {words}; {at}", tuple(wrong)
    )


def _fitting(sheets: Sheets, m: int, rank: int, other: int) -> list[str]:
    """Return the names of the `_ways` that give a rank's actual values."""
    batch_of_rank, others = sheets.reading.batches[m][rank], sheets.reading.batches[other][rank]
    if batch_of_rank.ids_TK.shape != others.ids_TK.shape:
        return []
    actual_TD = sheets.actual[m][rank].double()
    return [
        words
        for words, pairs in _ways(batch_of_rank, others).items()
        if len({len(of_P) for of_P in pairs}) == 1  # or the two routings have different numbers of pairs
        and torch.equal(actual_TD, _laid(sheets, pairs, sheets.units[m][rank]))
    ]


def _laid(sheets: Sheets, pairs: _Pairs, unit_TD: Tensor) -> Tensor:
    """Return the y (or dx) that a rank's pairs give, (T, D)."""
    gain_E = torch.tensor([tags.gain(e) for e in range(sheets.experts)], dtype=torch.float64)
    factor_P = pairs.weight_P * gain_E[pairs.expert_P]
    rows_PD = factor_P[:, None] * blocks(sheets.experts, unit_TD.shape[1])[pairs.expert_P] * unit_TD[pairs.from_P]
    return torch.zeros_like(unit_TD).index_add(0, pairs.to_P, rows_PD)


class _Pairs(NamedTuple):
    """A rank's routed pairs, sorted by expert, then token, then slot, as permutations sort them."""

    to_P: Tensor  # the token to whose y (or dx) a pair is added
    from_P: Tensor  # the token whose row (or upstream gradient) is its unit
    slot_P: Tensor
    expert_P: Tensor
    weight_P: Tensor


def _pairs(batch: Batch) -> _Pairs:
    token_P, slot_P = (batch.ids_TK >= 0).nonzero(as_tuple=True)
    expert_P = batch.ids_TK[token_P, slot_P]
    order_P = expert_P.argsort(stable=True)
    token_P, slot_P = token_P[order_P], slot_P[order_P]
    return _Pairs(token_P, token_P, slot_P, expert_P[order_P], batch.weights_TK.double()[token_P, slot_P])


def _ways(batch_of_rank: Batch, other: Batch) -> Mapping[str, _Pairs]:
    """Return the pairs of a rank mixed up with those of another microbatch on it, by a description of the way."""
    a, b = _pairs(batch_of_rank), _pairs(other)
    weight_aP = other.weights_TK.double()[a.from_P, a.slot_P]
    weight_bP = batch_of_rank.weights_TK.double()[b.from_P, b.slot_P]
    there = "the routing of microbatch {other} has in its place"
    return {
        f"every NOUN went to the token that {there}": a._replace(to_P=b.to_P),
        f"every NOUN went to the token that {there}, with the weight there": a._replace(
            to_P=b.to_P, weight_P=b.weight_P
        ),
        f"every NOUN was made of the UNIT that {there}": a._replace(from_P=b.from_P),
        f"every NOUN had the weight that {there}": a._replace(weight_P=b.weight_P),
        "every NOUN had the weight of microbatch {other} for its slot": a._replace(weight_P=weight_aP),
        "its tokens were routed as those of microbatch {other}": b,
        "its tokens were routed as those of microbatch {other}, with their own weights": b._replace(weight_P=weight_bP),
    }
