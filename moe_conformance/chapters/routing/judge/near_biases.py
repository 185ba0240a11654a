"""Judge of routers whose scores are all equal, so that only the expert bias decides, however small."""

from __future__ import annotations

import torch

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.router.routers import expected_of
from moe_conformance.judging.verdict import Tally, WrongSelection


def judge_near_biases(reading: Reading, tally: Tally) -> None:
    """Decide whether every token selects the experts with the largest biases, where all scores are equal.

    Tokens are zero, so that rounding errors of logits and scores do not differ between experts. Unlike in
    `judge_selection`, no other choice is legal within rounding if the biases differ in float32.

    Raises:
        WrongForm, WrongSelection: a token has other experts.
    """
    expected = expected_of(reading)
    bias_E, dtype = expected.bias_E, expected.workload.config.dtype
    assert bias_E is not None
    findings = []
    for place in expected.places:
        ids_TK, right_TK = expected.ids[place], expected.choice(place)
        wrong_T = (ids_TK.sort(1).values != right_TK.sort(1).values).any(1)
        for t in wrong_T.nonzero().flatten().tolist():
            chosen, best = sorted(ids_TK[t].tolist()), sorted(right_TK[t].tolist())
            sentence = (
                f"rank {place[1]} token {t} selected {chosen}; expected {best}, the largest biases of equal scores"
            )
            rounded_E = bias_E.to(dtype)
            others_E = torch.ones(len(rounded_E), dtype=torch.bool)
            others_E[chosen] = False
            tied = bool(others_E.any()) and bool(rounded_E[chosen].min() >= rounded_E[others_E].max())
            cause = f"; likely cause: the expert bias was rounded to {dtype}" if tied else ""
            findings.append(Finding("bias", sentence + cause, (place[1],)))
        tally.add(pairs=ids_TK.numel(), rank=place[1])
    if findings:
        fail(WrongSelection, "route", findings)
