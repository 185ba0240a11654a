"""Judges of exchanges around experts that return their input tensor: y, dx and dweights, exactly."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, apart, count
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.outputs import judge_inputs
from moe_conformance.judging.verdict import NotOffered, Tally, WrongGradient, WrongOutput
from moe_conformance.reference.exchange import layer
from moe_conformance.scenarios.outcome import Microbatch
from moe_conformance.workloads.records.workload import Batch

_Solved = tuple[tuple[layer.Gradients, ...], ...]  # [microbatch][rank]


def judge_identity_outputs(reading: Reading, tally: Tally) -> None:
    """Decide whether y of every token is the token times the sum of the weights of its filled slots.

    Raises:
        NotOffered: no expert returned its input tensor: weights are applied there, or several slots share a row.
        WrongOutput: an element differs, or y is missing.
    """
    _require_handed_back(reading)
    judge_answered_outputs(reading, tally)


def judge_identity_dx(reading: Reading, tally: Tally) -> None:
    """Decide whether dx of every token is its upstream gradient times the sum of its filled slots' weights.

    Raises:
        NotOffered, WrongGradient: as `judge_identity_outputs`.
    """
    _require_handed_back(reading)
    judge_answered_dx(reading, tally)


def judge_identity_dweights(reading: Reading, tally: Tally) -> None:
    """Decide whether the weight gradient of a filled slot is <x, upstream>, and that of an empty slot zero.

    Raises:
        NotOffered, WrongGradient: as `judge_identity_outputs`.
    """
    _require_handed_back(reading)
    judge_answered_dweights(reading, tally)


def judge_identity_inputs(reading: Reading, tally: Tally) -> None:
    """Decide `judge_inputs` where the delivered rows may be x itself, and the experts return them.

    Raises:
        NotOffered: as `judge_identity_outputs`.
        ChangedInput: an input was written over.
    """
    _require_handed_back(reading)
    judge_inputs(reading, tally)


# ---- whatever tensor experts return --------------------------------------------------------------------------------


@judge(WrongOutput, "combine")
def judge_answered_outputs(reading: Reading) -> Comparisons:
    """Decide `judge_identity_outputs`, also for expert outputs in newly allocated memory.

    Raises:
        WrongOutput: an element differs, or y is missing.
    """
    return _compared(reading, "y", lambda seen: seen.y, lambda solved: solved.y_TD)


@judge(WrongGradient, "gradient")
def judge_answered_dx(reading: Reading) -> Comparisons:
    """Decide `judge_identity_dx`, also for expert outputs in newly allocated memory.

    Raises:
        WrongGradient: an element differs, or dx is missing.
    """
    return _compared(reading, "dx", lambda seen: seen.dx_TD.value, lambda solved: solved.dx_TD)


@judge(WrongGradient, "gradient")
def judge_answered_dweights(reading: Reading) -> Comparisons:
    """Decide `judge_identity_dweights`, also for expert outputs in newly allocated memory.

    Raises:
        WrongGradient: an element differs, or dweights are missing.
    """
    return _compared(reading, "dweights", lambda seen: seen.dweights_TK.value, lambda solved: solved.dweights_TK)


def _compared(
    reading: Reading,
    name: str,
    of_run: Callable[[Microbatch], Tensor | None],
    of_oracle: Callable[[layer.Gradients], Tensor],
) -> Comparisons:
    for m, ranks in enumerate(once(reading, _solve)):
        for rank, solved in enumerate(ranks if name == "y" or reading.goes_backward(m) else ()):
            actual, expected = of_run(reading.seen(m, rank)), of_oracle(solved)
            if not len(expected):
                continue
            if actual is None or actual.shape != expected.shape:
                found = "None" if actual is None else f"of the shape {tuple(actual.shape)}"
                yield Finding("form", f"{name} of rank {rank} is {found}", (rank,))
                continue
            expected = _in_type_of(expected, reading.batches[m][rank], name)
            wrong = ~(actual.double() == expected)
            for t, column in wrong.nonzero().tolist()[:1]:
                of = f" of microbatch {m}" if len(reading.batches) > 1 else ""
                values = " instead of ".join(apart(float(actual[t, column]), float(expected[t, column])))
                sentence = (
                    f"{name} of rank {rank} token {t}{of} in column {column} is {values}, with experts that return "
                )
                words = f"{sentence}the tensor that they received; {count(int(wrong.any(1).sum()), 'token')} wrong"
                yield Finding(name, words, (rank,))
            yield Comparison(rank, elements=actual.numel())


def _in_type_of(expected: Tensor, batch: Batch, name: str) -> Tensor:
    """Return expected values rounded to the dtype of their input, which for weights may be wider than that of x."""
    dtype = (batch.weights_TK if name == "dweights" else batch.x_TD).dtype
    return expected.to(dtype).double()


def _solve(reading: Reading) -> _Solved:
    def solved(rank: int, m: int) -> layer.Gradients:
        batch = reading.batches[m][rank]
        given = (batch.x_TD, batch.ids_TK, batch.weights_TK, batch.upstream)
        return layer.gradients(*given, lambda _: lambda rows_RD, _: rows_RD, {})

    return tuple(tuple(solved(rank, m) for rank in range(len(ranks))) for m, ranks in enumerate(reading.batches))


def _require_handed_back(reading: Reading) -> None:
    if not any(seen.exchange.handed_back for rank in reading.ranks for seen in rank.microbatches):
        why = "weights are applied at the experts, or several slots share a row"
        raise NotOffered(f"no expert returned its input tensor: {why}")
