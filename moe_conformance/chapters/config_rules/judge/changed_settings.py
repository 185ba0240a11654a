"""Judge of settings that are changed after layers were built, compared with layers built with these settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moe_conformance.chapters.config_rules.judge.resolved_settings import words_of
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.verdict import NotOffered, Tally, WrongForm
from moe_conformance.reference.config_rules.shown import lawful_change
from moe_conformance.scenarios.outcome import Outcome

_CALLS = 6  # per change: build, shown, change, shown; then build and shown of a new layer


def judge_changed_later(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a change after building reaches all layers on all ranks, or raises and changes none.

    Raises:
        NotOffered: no setting can be changed.
        WrongForm: a layer has other settings than a new one, or was changed by a change that raised.
        Raised: layers could not be built or shown.
    """
    findings: list[Finding] = []
    for number in range(0, len(outcome.workload.calls), _CALLS):
        findings += _wrong_layers(outcome, number, tally)
    if findings:
        fail(WrongForm, "run", findings)


def _wrong_layers(outcome: Outcome, number: int, tally: Tally) -> Iterator[Finding]:
    """Yield a finding for each layer that has wrong settings after one change."""
    built, change, fresh = (answers(outcome, number + call) for call in (0, 2, 5))
    if problem := next((answer for answer in (*built, *change) if answer.error_by == "adapter"), None):
        raise NotOffered(problem.error)
    before, after = values(outcome, number + 1), values(outcome, number + 3)
    to = words_of(outcome.workload.calls[number + 2].given[0]["to"])
    raised = any(answer.raised for answer in change)
    expected = "as before, since the change raised" if raised else "as in a layer that is built with them"
    for rank, layers in enumerate(after):
        old = before[rank][0]
        new = old if fresh[rank].raised else fresh[rank].values[""][0]
        for layer, seen in enumerate(layers):
            if not lawful_change(old, new, [seen], raised):
                has = _differing(seen, old if raised else new)
                sentence = f"layer {layer} on rank {rank} has {has} after a change to {to}; expected: {expected}"
                yield Finding("layer", sentence, (rank,))
            tally.add(pairs=1, rank=rank)


def _differing(seen: Mapping[str, Any], due: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} = {value!r} instead of {due[name]!r}" for name, value in seen.items() if value != due[name]
    )
