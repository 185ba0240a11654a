"""Judges of pieces that are padded to equal splits and cut back, bit for bit, and of the split size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_conformance.judging.compare.tensors import judge_tensor
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.verdict import Tally, WrongCount, WrongForm, WrongGradient, WrongOutput
from moe_conformance.reference.fast_paths.equal_splits import compact, lawful_splits, pad, smallest_split
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Ref


def judge_sizes(outcome: Outcome, tally: Tally) -> None:
    """Decide whether all ranks of every ep group pad to one size, which holds the largest piece.

    Raises:
        WrongCount: sizes differ, or a piece does not fit.
        Raised, Hung, Died: a rank did not finish.
    """
    findings = []
    for number, call in enumerate(outcome.workload.calls):
        if call.method != "size":
            continue
        found = values(outcome, number)
        for ranks in outcome.workload.layout.groups()["ep"]:
            splits_WW = torch.tensor([call.given[rank]["pieces"] for rank in ranks])
            sizes = [int(found[rank]) for rank in ranks]
            if not lawful_splits(sizes, splits_WW):
                least = smallest_split(splits_WW)
                largest_of_rank = sizes == splits_WW.max(dim=1).values.tolist()
                cause = "; likely cause: every rank takes the largest of its own pieces" if largest_of_rank else ""
                said = f"ranks {', '.join(map(str, ranks))} pad the pieces of call {number} to {sizes} rows instead of "
                findings.append(Finding("size", f"{said}one number, {least} or more{cause}", tuple(ranks)))
            for rank in ranks:
                tally.add(pairs=1, rank=rank)
    if findings:
        fail(WrongCount, "dispatch", findings)


def judge_padded(outcome: Outcome, tally: Tally) -> None:
    """Decide whether padded pieces have their rows first, in order, and zeros after them.

    Raises:
        WrongForm, WrongOutput: another shape, dtype or value.
        Raised, Hung, Died: a rank did not finish.
    """
    for number, rank, given in _calls(outcome, "pad"):
        expected_PD = pad(given["rows_RD"], given["pieces"], given["size"])
        _judge_rows(outcome, (number, rank), given["rows_RD"].dtype, expected_PD, tally, f"padded{_of(given)}")


def judge_compacted(outcome: Outcome, tally: Tally) -> None:
    """Decide whether cutting back returns the rows of every piece, whether padding is the backend's or NaN.

    Raises:
        WrongForm, WrongOutput: another shape, dtype or value.
        Raised, Hung, Died: a rank did not finish.
    """
    for number, rank, given in _calls(outcome, "compact"):
        rows_PD = given["rows_PD"]
        if isinstance(rows_PD, Ref):  # the result of a pad: its rows must be returned
            first = outcome.workload.calls[rows_PD.call].given[rank]
            dtype, expected_RD = first["rows_RD"].dtype, first["rows_RD"]
        else:
            dtype, expected_RD = rows_PD.dtype, compact(rows_PD, given["pieces"], given["size"])
        _judge_rows(outcome, (number, rank), dtype, expected_RD, tally, f"cut back{_of(given)}")


def judge_gradients(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every row has the upstream gradient of its position, and padding adds nothing.

    Raises:
        AbsentGradient, WrongForm, WrongGradient: a gradient is None, or has another shape or value.
        Raised, Hung, Died: a rank did not finish.
    """
    for method, name, ask in (("pad", "rows_RD", pad), ("compact", "rows_PD", compact)):
        for number, rank, given in _calls(outcome, method):
            call = outcome.workload.calls[number]
            if not call.upstream:
                continue
            leaf = given[name].double().requires_grad_()
            ask(leaf, given["pieces"], given["size"]).backward(call.upstream[rank][""].double())
            assert leaf.grad is not None  # the oracle's result depends on it
            judge_tensor(
                answers(outcome, number)[rank].gradients[name], leaf.grad, tally, error=WrongGradient, stage="gradient",
                what=f"the gradient of the rows to {method}{_of(given)}", rank=rank,
            )  # fmt: skip


def _calls(outcome: Outcome, method: str) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yield the number, the rank and the arguments of every call of a method."""
    for number, call in enumerate(outcome.workload.calls):
        if call.method == method:
            yield from ((number, rank, given) for rank, given in enumerate(call.given))


def _judge_rows(
    outcome: Outcome, at: tuple[int, int], dtype: torch.dtype, expected: Tensor, tally: Tally, what: str
) -> None:
    number, rank = at
    actual = values(outcome, number)[rank]
    if actual.dtype != dtype:
        raise WrongForm("dispatch", f"rows {what} are {actual.dtype} on rank {rank} instead of {dtype}", ranks=(rank,))
    judge_tensor(actual, expected, tally, error=WrongOutput, stage="dispatch", what=f"the rows {what}", rank=rank)


def _of(given: Mapping[str, Any]) -> str:
    return f", pieces {list(given['pieces'])} in splits of {given['size']}"
