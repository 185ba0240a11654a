"""Weights: each routing weight reaches the experts with its own pair, or stays away where it is applied later."""

from __future__ import annotations

import torch

from moe_conformance.judging.findings import Finding, common_ratio, fail, likeliest, ratio_words
from moe_conformance.judging.observed.run import Entry, Match, Reading
from moe_conformance.judging.verdict import NotOffered, Tally, WrongWeight


def judge_weights(reading: Reading, tally: Tally) -> None:
    """Decide whether each delivered pair carries the weight of its own (token, slot), exactly.

    Weights at the input are the scale of the row, and none but ones may travel beside it; weights at the experts travel
    beside an unscaled row; weights at combine do not travel. Lost pairs and corrupt rows are judged elsewhere.

    Raises:
        NotOffered: weights are applied in combine, so that none travel.
        WrongWeight: a pair carries another weight, none, or one where none belongs.
    """
    findings = _misplaced(reading)
    if findings:
        fail(WrongWeight, "dispatch", findings)
    if all(applied == "combine" for of_rank in reading.applied for applied in of_rank):
        raise NotOffered("weights are applied in combine: none travel")
    travelling, wrong = _travelling(reading), wrong_weights(reading)
    if wrong:
        carried = torch.tensor([_carried(reading, match.entry) for match in travelling], dtype=torch.float64)
        own = torch.tensor([_own(reading, match) for match in travelling], dtype=torch.float64)
        ratio = common_ratio(carried, own) if len(travelling) > 1 else None
        ranks = tuple(match.entry.rank for match in wrong)
        if ratio is not None:
            sentence = f"every weight that travels to the experts is {ratio_words(ratio, reading.token_ratios)}"
            fail(WrongWeight, "dispatch", [Finding("ratio", sentence, ranks)], ratio=ratio)
        fail(WrongWeight, "dispatch", likeliest([_told(reading, match) for match in wrong]))
    for match in travelling:
        tally.add(pairs=1, rank=match.entry.rank)


def wrong_weights(reading: Reading) -> list[Match]:
    """List the delivered pairs whose weight travels with them and is another than their own."""
    return [match for match in _travelling(reading) if _carried(reading, match.entry) != _own(reading, match)]


def _travelling(reading: Reading) -> list[Match]:
    return [match for match in reading.matching.matches if reading.applied_to(match.entry) != "combine"]


def _carried(reading: Reading, entry: Entry) -> float:
    """Return the weight that travels with a row: in it or beside it."""
    return entry.scale if reading.applied_to(entry) == "input" else entry.weight or 0.0


def _own(reading: Reading, match: Match) -> float:
    return reading.weight(match.entry.microbatch, match.pair)


def _misplaced(reading: Reading) -> list[Finding]:
    """Find weights that travel where the session says that they do not, and the reverse."""
    findings = []
    for pair, entry in reading.matching.matches:
        applied = reading.applied_to(entry)
        if applied == "expert" and entry.weight is None:
            sentence = f"{entry.place} carries no weight, and the experts are to apply it"
            findings.append(Finding("no weight", sentence, (entry.rank,)))
        if applied != "expert" and entry.weight not in (None, 1.0):
            sentence = (
                f"{entry.place} carries the weight {entry.weight:g} beside it, to be applied by the experts; "
                f"weights are said to be applied at {applied}: rank {pair.source} token {pair.token} is weighted twice"
            )
            findings.append(Finding("a weight too many", sentence, (entry.rank,)))
    return findings


def _told(reading: Reading, match: Match) -> list[Finding]:
    """Tell one wrong weight, once for everything that it may be, see `diagnosis.likeliest`."""
    carried, own = _carried(reading, match.entry), _own(reading, match)
    pair, entry = match.pair, match.entry
    carries = f"{entry.token_name} slot {pair.slot} at expert {pair.expert} on rank {entry.rank} carries {carried:g}"
    return [
        Finding(kind, f"{carries}{holds and f', {holds},'} instead of {own:g}", (entry.rank,), abs(carried - own))
        for kind, holds in _whose(reading, match, carried) or [("another weight", "")]
    ]


def _whose(reading: Reading, match: Match, carried: float) -> list[tuple[str, str]]:
    """List where a weight may come from, likeliest first: the token's other slots, its own, another token."""
    pair, microbatch = match.pair, match.entry.microbatch
    own, of_token = _own(reading, match), reading.weights[microbatch][pair.source][pair.token]
    found = []
    if carried in of_token:
        found.append(("another slot's weight", f"the weight of slot {of_token.index(carried)}"))
    if carried == 1:
        found.append(("unweighted", "as if unweighted"))
    if carried == 0:
        found.append(("zero weight", ""))
    for factor, word in ((2.0, "twice"), (0.5, "half")):
        if carried == factor * own:
            found.append((word, f"{word} its own"))
    others = [
        f"the weight of rank {r} token {t} slot {weights_K.index(carried)}"
        for r, weights_TK in enumerate(reading.weights[microbatch])
        for t, weights_K in enumerate(weights_TK)
        if carried in weights_K
    ]
    if others:
        words = others[0] if len(others) == 1 else f"a weight of {len(others)} other tokens"
        found.append(("another token's weight", words))
    return found
