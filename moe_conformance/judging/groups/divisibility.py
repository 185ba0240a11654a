"""Sizes that a layout does not divide are refused when the module is built, with an error that names both numbers."""

from __future__ import annotations

import re

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.script import answers, judge_refused
from moe_conformance.judging.verdict import NotOffered, Tally, WrongForm
from moe_conformance.reference.groups.rules import indivisible
from moe_conformance.scenarios.outcome import Outcome


def judge_indivisible(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every rank refuses to build what is not divisible, and its error names both numbers.

    For E = 0 the error needs to name only that number. What the adapter refuses proves nothing about the library.

    Raises:
        Unrefused, Hung: some ranks built it.
        WrongForm: the error lacks one of the numbers.
        NotOffered: the adapter refused everything.
    """
    layout = outcome.workload.layout
    findings: list[Finding] = []
    calls = range(len(outcome.workload.calls))
    by_adapter = [all(answer.error_by == "adapter" for answer in answers(outcome, call)) for call in calls]
    if all(by_adapter):
        raise NotOffered(answers(outcome, 0)[0].error)
    for number, call in enumerate(outcome.workload.calls):
        if by_adapter[number]:
            continue
        config = call.given[0]["config"]
        reason = indivisible(config.experts, config.ffn, layout.ep, layout.etp)
        assert reason is not None, config  # the corpus asks for nothing else
        for rank, said in enumerate(
            judge_refused(outcome, number, tally, stage="run", asked=f"a configuration with {reason}")
        ):
            numbers = re.findall(r"= (\d+)", reason)[: 2 if config.experts else 1]
            if missing := [each for each in numbers if not re.search(rf"\b{each}\b", said)]:
                lacking = " and ".join(missing)
                sentence = f"{call.method}: the error for {reason} on rank {rank} does not name {lacking}: {said!r}"
                findings.append(Finding("words", sentence, (rank,)))
    if findings:
        fail(WrongForm, "run", findings)
