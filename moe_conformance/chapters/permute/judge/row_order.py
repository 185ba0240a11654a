"""Judges of rows that are reordered by counts or by an index: exact outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_conformance.judging.compare.tensors import judge_tensor
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.verdict import Tally, WrongGradient, WrongOutput
from moe_conformance.reference.permute.reorder import to_expert_major, to_source_major
from moe_conformance.reference.permute.row_index import gather, scatter
from moe_conformance.scenarios.outcome import Outcome


def judge_reordering(outcome: Outcome, tally: Tally) -> None:
    """Decide whether rows are reordered to expert-major and back to source-major order, and gradients inversely.

    Raises:
        WrongForm, WrongOutput, WrongGradient: rows or gradients are in the wrong order.
    """
    given = [call.given[0] for call in outcome.workload.calls]
    upstream = [call.upstream[0].get("") if call.upstream else None for call in outcome.workload.calls]
    counts_WN, there_RD, back_RD = given[0]["counts_WN"], given[0]["rows_RD"], given[2]["rows_RD"]
    assert upstream[0] is not None  # the script has both calls
    assert upstream[2] is not None
    expert, source = "rows in expert-major order", "rows in source-major order"
    _same(outcome, 0, to_expert_major(there_RD, counts_WN), tally, expert)
    _same(outcome, 1, there_RD, tally, f"{source} again")
    _same(outcome, 2, to_source_major(back_RD, counts_WN), tally, source)
    _same_gradient(outcome, 0, "rows_RD", to_source_major(upstream[0], counts_WN), tally, f"the gradient of {source}")
    _same_gradient(outcome, 2, "rows_RD", to_expert_major(upstream[2], counts_WN), tally, f"the gradient of {expert}")


def judge_row_index(outcome: Outcome, tally: Tally) -> None:
    """Decide whether sentinels in a row index give zeros in a gather, and add nothing in a scatter.

    Raises:
        WrongForm, AbsentGradient, WrongOutput, WrongGradient: a row, sum or gradient is wrong.
    """
    for number, call in enumerate(outcome.workload.calls):
        given = call.given[0]
        leaves = {name: given[name].to(torch.float64, copy=True).requires_grad_() for name in call.differentiable}
        calculate: Callable[..., Tensor] = gather if call.method == "gather" else scatter
        expected = calculate(*{**given, **leaves}.values())  # both take the arguments in this order
        sentinel = f"sentinel {-1 if number < len(outcome.workload.calls) // 2 else 'T'}"
        what, row = ("the rows gathered", "row") if call.method == "gather" else ("the sums scattered", "token")
        _same(outcome, number, expected.detach(), tally, f"{what} with {sentinel}", row)
        expected.backward(call.upstream[0][""].double())
        for name, leaf in leaves.items():
            said = f"the gradient of {name.rpartition('_')[0]} of {call.method} with {sentinel}"
            assert leaf.grad is not None  # the oracle's result depends on all of them
            _same_gradient(outcome, number, name, leaf.grad, tally, said)


def _same(outcome: Outcome, call: int, expected: Tensor, tally: Tally, what: str, row: str = "row") -> None:
    (actual,) = values(outcome, call)
    judge_tensor(actual, expected, tally, error=WrongOutput, stage="dispatch", what=what, row=row)


def _same_gradient(outcome: Outcome, call: int, name: str, expected: Tensor, tally: Tally, what: str) -> None:
    actual = answers(outcome, call)[0].gradients[name]
    judge_tensor(actual, expected, tally, error=WrongGradient, stage="gradient", what=what)
