"""Judge of routing weights: each is delivered to the experts with its own pair, or not sent if combine applies it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_conformance.judging.findings import Finding, common_ratio, fail, likeliest, ratio_words
from moe_conformance.judging.observed.run import Entry, Match, Reading
from moe_conformance.judging.verdict import NotOffered, Tally, WrongWeight


def judge_weights(reading: Reading, tally: Tally) -> None:
    """Decide whether each delivered pair has the weight of its own (token, slot), exactly.

    Weights at the input are the scale of the row, and none but ones may be delivered with it; weights at the experts
    are delivered with an unscaled row; weights at combine are not sent. Other judges decide missing pairs and corrupt
    rows.

    Raises:
        NotOffered: weights are applied in combine, so that none are sent.
        WrongWeight: a pair has another weight, none, or one although none is expected.
    """
    if findings := list(_misplaced(reading)):
        fail(WrongWeight, "dispatch", findings)
    if all(applied == "combine" for of_rank in reading.applied for applied in of_rank):
        raise NotOffered("weights are applied in combine and not sent")
    travelling, wrong = _travelling(reading), wrong_weights(reading)
    if wrong:
        carried = torch.tensor([_carried(reading, match.entry) for match in travelling], dtype=torch.float64)
        expected = torch.tensor([_expected_weight(reading, match) for match in travelling], dtype=torch.float64)
        ratio = common_ratio(carried, expected) if len(travelling) > 1 else None
        ranks = tuple(match.entry.rank for match in wrong)
        if ratio is not None:
            sentence = f"every routing weight at the experts is {ratio_words(ratio, reading.token_ratios)}"
            fail(WrongWeight, "dispatch", [Finding("ratio", sentence, ranks)], ratio=ratio)
        fail(WrongWeight, "dispatch", likeliest([_weight_findings(reading, match) for match in wrong]))
    for match in travelling:
        tally.add(pairs=1, rank=match.entry.rank)


def wrong_weights(reading: Reading) -> list[Match]:
    """Return the delivered pairs that have a weight delivered with them other than their own."""
    return [
        match for match in _travelling(reading) if _carried(reading, match.entry) != _expected_weight(reading, match)
    ]


def _travelling(reading: Reading) -> list[Match]:
    return [match for match in reading.matching.matches if reading.applied_to(match.entry) != "combine"]


def _carried(reading: Reading, entry: Entry) -> float:
    """Return the weight that is delivered with a row: as its scale, or as a separate number."""
    return entry.scale if reading.applied_to(entry) == "input" else entry.weight or 0.0


def _expected_weight(reading: Reading, match: Match) -> float:
    return reading.weight(match.entry.microbatch, match.pair)


def _misplaced(reading: Reading) -> Iterator[Finding]:
    """Yield findings for weights that are delivered though the session reports that they are not, and the reverse."""
    for pair, entry in reading.matching.matches:
        applied = reading.applied_to(entry)
        if applied == "expert" and entry.weight is None:
            sentence = f"{entry.place} has no routing weight; expected one, since the experts apply it"
            yield Finding("no weight", sentence, (entry.rank,))
        if applied != "expert" and entry.weight not in (None, 1.0):
            sentence = (
                f"{entry.place} has the routing weight {entry.weight:g} for the experts, although weights are applied "
                f"at {applied}: rank {pair.source} token {pair.token} is multiplied by its weight twice"
            )
            yield Finding("applied twice", sentence, (entry.rank,))


def _weight_findings(reading: Reading, match: Match) -> list[Finding]:
    """Return one finding per likely cause of a wrong weight, for `findings.likeliest`."""
    carried, expected = _carried(reading, match.entry), _expected_weight(reading, match)
    pair, entry = match.pair, match.entry
    whose = f"{entry.token_name} slot {pair.slot} at expert {pair.expert} on rank {entry.rank}"
    sentence = f"{whose} has the weight {carried:g} instead of {expected:g}"
    return [
        Finding(kind, f"{sentence}{cause and f'; likely cause: {cause}'}", (entry.rank,), abs(carried - expected))
        for kind, cause in _whose(reading, match, carried) or [("another weight", "")]
    ]


def _whose(reading: Reading, match: Match, carried: float) -> list[tuple[str, str]]:
    """Return the likely causes of a wrong weight, each with its kind, likeliest first."""
    pair, microbatch = match.pair, match.entry.microbatch
    expected, of_token = _expected_weight(reading, match), reading.weights[microbatch][pair.source][pair.token]
    found = []
    if carried in of_token:
        found.append(("another slot's weight", f"the weight of slot {of_token.index(carried)}"))
    if carried == 1:
        found.append(("unweighted", "the weight was not applied"))
    if carried == 0:
        found.append(("zero weight", ""))
    for factor, word in ((2.0, "twice"), (0.5, "half")):
        if carried == factor * expected:
            found.append((word, f"{word} its own weight"))
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
