"""Judges of wrong use of an exchange: it is refused, no rank hangs, and later calls are right."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, some, unequal
from moe_conformance.judging.observed.probe_expected import expect
from moe_conformance.judging.observed.script import answers, judge_no_slip, judge_refused, values
from moe_conformance.judging.verdict import Tally, Unrefused, WrongOutput, in_turn
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads import misuse
from moe_conformance.workloads.records.workload import Workload


def wrong_input(workload: Workload) -> bool:
    """Return whether the invalid input is one of dispatch."""
    return bool(misuse.input_of(workload))


def wrong_answers(workload: Workload) -> bool:
    """Return whether the invalid input is one of combine."""
    return bool(misuse.answer_of(workload)) or misuse.TWICE in workload.shows


def judge_wrong_input(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every rank of an exchange group raises if one of its ranks has invalid input.

    The step with invalid input is between two valid steps.

    Raises:
        Unrefused: a rank accepted it.
        Hung, Died, Raised: a rank waits for another or ended, or a valid step raised.
        WrongOutput: y of a valid step is wrong.
    """
    what, _ = misuse.INPUTS[misuse.input_of(outcome.workload)]
    of_a_type = what == misuse.INPUTS["ids-in-float"][0]
    number = wrong_call(outcome.workload)
    on = some(_culprits(outcome.workload, number))
    asked = f"{what} on rank {on}"
    refused = partial(judge_refused, outcome, number, tally, stage="dispatch", asked=asked, of_a_type=of_a_type)
    in_turn([refused, *(partial(judge_y, outcome, tally, right) for right in (number - 1, number + 1))])


def judge_wrong_answers(outcome: Outcome, tally: Tally) -> None:
    """Decide whether ranks raise on invalid input to combine, no other rank hangs, and later steps are right.

    A second combine with the same handle may be refused by all ranks, or return the same result on all.

    Raises:
        Unrefused: a rank accepted what does not fit.
        Raised: an internal error instead of a refusal; see `judge_no_slip`.
        Hung, Died, Raised: a rank waits for another or ended, or a valid call raised.
        WrongOutput: y of a valid call is wrong.
    """
    number, calls = wrong_call(outcome.workload), len(outcome.workload.calls)
    after = (partial(judge_y, outcome, tally, call) for call in range(number + 1, calls))
    in_turn([partial(_judge_wrong_answer, outcome, tally, number), *after])


def _judge_wrong_answer(outcome: Outcome, tally: Tally, number: int) -> None:
    workload = outcome.workload
    found = answers(outcome, number)
    if misuse.TWICE in workload.shows:
        if any(answer.raised for answer in found):
            judge_refused(outcome, number, tally, stage="combine", asked="a handle that was used in combine before")
        else:
            judge_y(outcome, tally, number)
    else:
        judge_no_slip(outcome, number)
        wrong = [rank for rank, given in enumerate(workload.calls[number].given) if given != misuse.RIGHT]
        answered = [rank for rank in wrong if not found[rank].raised and _can_tell(outcome, number, rank)]
        if answered:
            what, _ = misuse.ANSWERS[misuse.answer_of(workload)]
            sentence = f"combine accepted {what} on rank {some(answered)}; expected: an error"
            raise Unrefused("combine", sentence, ranks=tuple(answered))
        for rank in wrong:  # if the shapes are equal there is nothing to refuse
            tally.add(pairs=1, rank=rank)


def _culprits(workload: Workload, number: int) -> list[int]:
    """Return the ranks whose input differs from that of the valid step before it."""
    culprits = []
    for rank, given in enumerate(workload.calls[number].given):
        valid = _tensors(workload.calls[number - 1].given[rank])
        if any(one is not another for one, another in zip(_tensors(given), valid, strict=True)):
            culprits.append(rank)
    return culprits


def _tensors(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return given["x"], given["routing"].ids_TK, given["routing"].weights_TK


def _can_tell(outcome: Outcome, number: int, rank: int) -> bool:
    """Return whether the expert outputs of a rank have another shape than the rows delivered under the handle."""
    given = outcome.workload.calls[number].given[rank]
    shapes = [
        outcome.ranks[rank].answers[given[name].call].values["delivery"]["rows_RD"].shape
        for name in ("answers_of", "handle_of")
    ]
    return "width" in given or shapes[0] != shapes[1]


@judge(WrongOutput, "combine")
def judge_y(outcome: Outcome, call: int) -> Comparisons:
    """Decide whether a call returned the weighted sum of the suite's experts, exactly."""
    expected = expect(outcome.workload, [1.0]).y[0]
    for rank, (y_TD, expected_TD) in enumerate(zip(values(outcome, call), expected, strict=True)):
        if y_TD.shape == expected_TD.shape and torch.equal(y_TD.double(), expected_TD):
            yield Comparison(rank, elements=y_TD.numel())
        else:
            sentence = f"y of rank {rank} in {_place(outcome.workload, call)} {unequal(y_TD, expected_TD)}"
            yield Finding("valid call", sentence, (rank,))


def wrong_call(workload: Workload) -> int:
    """Return the number of the call with invalid input, which is the first that may raise."""
    return next(number for number, call in enumerate(workload.calls) if call.may_raise)


def _place(workload: Workload, call: int) -> str:
    wrong = wrong_call(workload)
    if call == wrong:
        return "the call with invalid input, which was accepted,"
    return f"the valid call {'before' if call < wrong else 'after'} the invalid one"
