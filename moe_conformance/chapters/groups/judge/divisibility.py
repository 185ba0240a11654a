"""Judge of sizes that a layout does not divide: refused at building, with an error that names both numbers.

Experts that ep does not divide may also be accepted, if each is on one rank of its group.
"""

from __future__ import annotations

import re

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, some
from moe_conformance.judging.observed.script import answers, judge_refused
from moe_conformance.judging.verdict import NotOffered, Tally, Unrefused, WrongForm
from moe_conformance.reference.groups.rules import indivisible
from moe_conformance.scenarios.outcome import Outcome


@judge(WrongForm, "run")
def judge_indivisible(outcome: Outcome) -> Comparisons:
    """Decide whether every rank refuses to build with indivisible sizes, and its error names both numbers.

    For E = 0 the error needs to name only that number. A refusal by the adapter is no refusal by the library.
    Experts that ep does not divide may be built on every rank, if the ranks of every ep group hold each of them once.

    Raises:
        Unrefused, Hung: some ranks built it, or all did, and an expert is on no rank or on several.
        WrongForm: the error lacks one of the numbers.
        NotOffered: the adapter refused everything.
    """
    layout = outcome.workload.layout
    calls = range(len(outcome.workload.calls))
    by_adapter = [all(answer.error_by == "adapter" for answer in answers(outcome, call)) for call in calls]
    if all(by_adapter):
        raise NotOffered(answers(outcome, 0)[0].error)
    for number, call in enumerate(outcome.workload.calls):
        if by_adapter[number]:
            continue
        config = call.given[0]["config"]
        reason = indivisible(config.experts, config.ffn, layout.ep, layout.etp)
        assert reason is not None, config  # other calls are not in the workloads
        if config.experts % layout.ep and _all_placed(outcome, number, reason):
            for rank in range(layout.world):
                yield Comparison(rank, pairs=1)
            continue
        numbers = re.findall(r"= (\d+)", reason)[: 2 if config.experts else 1]
        errors = judge_refused(outcome, number, Tally(), stage="run", asked=f"a configuration with {reason}")
        for rank, error in enumerate(errors):
            missing = [size for size in numbers if not re.search(rf"\b{size}\b", error)]
            lacking = f"on rank {rank} does not name {' and '.join(missing)}: {error!r}"
            wrong = Finding("words", f"{call.method}: the error for {reason} {lacking}", (rank,))
            yield Comparison(rank, wrong if missing else "", pairs=1)


def _all_placed(outcome: Outcome, call: int, reason: str) -> bool:
    """Return whether every rank built a surface that places all experts; False if some refused or it places none.

    Raises:
        Unrefused: the surface places experts, and one is not on exactly one rank of an ep group.
    """
    made, found = outcome.workload.calls[call], answers(outcome, call)
    if any(answer.raised or "local_experts" not in answer.values for answer in found):
        return False
    held = [answer.values["local_experts"] for answer in found]
    for group in outcome.workload.layout.groups()["ep"]:
        together = [expert for rank in group for expert in held[rank]]
        for expert in range(made.given[0]["config"].experts):
            if together.count(expert) != 1:
                on = some([f"rank {rank}" for rank in group if expert in held[rank]]) or "no rank"
                sentence = f"{made.method} accepted a configuration with {reason}, and expert {expert} is on {on}"
                expected = "expected: an error on every rank, or every expert on one"
                raise Unrefused("run", f"{sentence}; {expected}", ranks=tuple(group))
    return True
