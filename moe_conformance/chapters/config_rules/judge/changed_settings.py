"""Judge of settings that are changed after layers were built, compared with layers built with these settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.shared.overlapped.accepted import words_of
from moe_conformance.judging.verdict import NotOffered, WrongForm
from moe_conformance.reference.config_rules.shown import lawful_change
from moe_conformance.scenarios.outcome import Outcome

_CALLS = 6  # per change: build, shown, change, shown; then build and shown of a new layer


@judge(WrongForm, "run")
def judge_changed_later(outcome: Outcome) -> Comparisons:
    """Decide whether a change after building reaches all layers on all ranks, or raises and changes none.

    Raises:
        NotOffered: no setting can be changed.
        WrongForm: a layer has other settings than a new one, or was changed by a change that raised.
        Raised: layers could not be built or shown.
    """
    for number in range(0, len(outcome.workload.calls), _CALLS):
        yield from _compare_layers(outcome, number)


def _compare_layers(outcome: Outcome, number: int) -> Comparisons:
    """Yield whether every layer has the right settings after one change."""
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
            has = _differing(seen, old if raised else new)
            sentence = f"layer {layer} on rank {rank} has {has} after a change to {to}; expected: {expected}"
            lawful = lawful_change(old, new, [seen], raised)
            yield Comparison(rank, "" if lawful else Finding("layer", sentence, (rank,)), pairs=1)


def _differing(seen: Mapping[str, Any], due: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} = {value!r} instead of {due[name]!r}" for name, value in seen.items() if value != due[name]
    )
