"""Judges of equal splits: of their size, of pieces that are padded and cut back, and of exchanges in the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_conformance.engine.ledger.entry import Entry
from moe_conformance.judging.compare.tensors import judge_tensor
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.ledgers import judge_agreement
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.observed.traffic import carries_rows, exchange_phases
from moe_conformance.judging.verdict import Tally, WrongCount, WrongForm, WrongGradient, WrongOutput
from moe_conformance.reference.fast_paths.equal_splits import compact, lawful_splits, pad, smallest_split
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Ref


@judge(WrongCount, "dispatch")
def judge_sizes(outcome: Outcome) -> Comparisons:
    """Decide whether all ranks of every ep group pad to one size, which holds the largest piece.

    Raises:
        WrongCount: sizes differ, or a piece does not fit.
        Raised, Hung, Died: a rank did not finish.
    """
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
                yield Comparison(None, Finding("size", f"{said}one number, {least} or more{cause}", tuple(ranks)))
            for rank in ranks:
                yield Comparison(rank, pairs=1)


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
    for method, name, oracle in (("pad", "rows_RD", pad), ("compact", "rows_PD", compact)):
        for number, rank, given in _calls(outcome, method):
            call = outcome.workload.calls[number]
            if not call.upstream:
                continue
            leaf = given[name].to(torch.float64, copy=True).requires_grad_()
            oracle(leaf, given["pieces"], given["size"]).backward(call.upstream[rank][""].double())
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


@judge(WrongCount, "run")
def judge_equal_splits(reading: Reading) -> Comparisons:
    """Decide whether all splits of every all-to-all of rows are equal, in dispatch, combine and backward.

    The ranks of a group then have the same split, since the sizes that are sent and received fit together.

    Raises:
        WrongCount: the splits of a rank differ within a call.
        WrongCollectives: the ledgers of two ranks do not fit together.
    """
    judge_agreement(reading.outcome, Tally())
    hidden = reading.outcome.workload.config.hidden
    for rank in reading.ranks:
        for phase, calls in exchange_phases(rank):
            for entry in calls:
                if entry.op.startswith("all_to_all") and carries_rows(entry, hidden):
                    found = _splits(entry)
                    what = f"{entry.op} of {phase} has the splits {list(found)}"
                    wrong = f"rank {rank.rank}: {what} instead of equal ones" if len({*found}) > 1 else ""
                    yield Comparison(rank.rank, wrong, pairs=1, kind="splits")


def _splits(entry: Entry) -> tuple[int, ...]:
    """Return the rows sent to and received from every rank; () for even splits, which calls leave out."""
    if entry.op == "all_to_all":  # calls with lists of tensors
        return tuple(shape[0] for shape in (*entry.shapes_in, *entry.shapes_out))
    return (*(entry.in_splits or ()), *(entry.out_splits or ()))
