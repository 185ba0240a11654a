"""Judge of derivatives of gradients, which a second backward computes or every rank refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.chapters.gradients.scenario import (
    BACKWARD,
    SECOND_BACKWARD,
    ExchangeTwice,
    ExpertsTwice,
    SecondSeen,
    direction,
)
from moe_conformance.judging.compare.bounded import Target, compare
from moe_conformance.judging.compare.bounds import unit_roundoff
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.runs import Ran, read_twin, those_that_ran
from moe_conformance.judging.shared.experts.expected import batches_of, experts_of, parameters_of
from moe_conformance.judging.verdict import Hung, WrongGradient
from moe_conformance.reference.experts import tagged_experts
from moe_conformance.reference.gradients.second_derivatives import second_derivatives
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.twins import Twin, rows_of, the_same, twin

# Of the size of a derivative, in unit roundoffs of float32 or of the tokens' narrower dtype: more than there are
# operations from x to a derivative. What is not differentiated is missing as a whole. The probe rounds nothing.
_ROUNDINGS = 64
_BACKWARDS = (f"{BACKWARD}:", f"{SECOND_BACKWARD}:")


def differentiated_twice(workload: Workload) -> list[Twin]:
    """Return twins with a second backward: with the tokens of the workload, and with none on the last rank."""
    how, run = "with a second backward", ExpertsTwice() if workload.parameters else ExchangeTwice()
    made = [twin(workload, how, finals=False)]
    if workload.layout.world > 1:
        kept = tuple((*ranks[:-1], rows_of([], workload)) for ranks in the_same(workload))
        made.append(twin(workload, f"{how} and no token on the last rank", kept, finals=False))
    return [replace(one, workload=replace(one.workload, run=run)) for one in made]


@judge(WrongGradient, "gradient")
def judge_second_derivatives(ran: Sequence[Ran]) -> Comparisons:
    """Decide whether <dL/dx, v> has the right derivatives, by the upstream gradient and by the routing weights.

    An error of any type counts as a refusal if every rank raised one in a backward, the first or the second.
    Derivatives by weights that are applied before the experts are not compared.

    Raises:
        NotOffered: the backend refused every run on every rank, or ran none.
        WrongGradient: a derivative is None, or wrong.
        Hung: some ranks raised, and the others wait for them.
        Raised, Died: a rank ended in another way.
    """
    for twin_run in those_that_ran(list(map(_or_refused, ran))):
        reading = _finished(twin_run)
        for rank in reading.ranks:
            for m, seen in rank.seen.items():
                for what in _compared(reading, m, rank.rank, seen):
                    yield replace(what, wrong=f"run {twin_run.twin.how}, {what.wrong}") if what.wrong else what


def _or_refused(ran: Ran) -> Ran:
    """Return a run as not run if every rank raised an error in one of its backwards."""
    ranks = () if ran.outcome is None else ran.outcome.ranks
    if not ranks or not all(rank.status == "raised" and rank.reached.startswith(_BACKWARDS) for rank in ranks):
        return ran
    return replace(ran, outcome=None, why_not=f"refused on every rank with {ranks[0].error}")


def _finished(ran: Ran) -> Reading:
    """Return the reading of a run; a hang gets its likely cause.

    The same case has finished without a second backward.
    """
    try:
        return read_twin(ran)
    except Hung as error:
        cause = "another rank raised in one of its backwards, or has no second one, as its gradient is not recorded"
        hung = Hung(error.stage, f"{error.sentence}; likely cause: {cause}", ranks=error.ranks)
        hung.place = error.place
        raise hung from error


def _compared(reading: Reading, m: int, rank: int, seen: SecondSeen) -> Iterator[Comparison]:
    """Compare both derivatives of one rank with the oracle's."""
    workload = reading.outcome.workload
    at_input = reading.applied[rank][m] == "input"
    if isinstance(workload.run, ExpertsTwice):
        expert = experts_of(workload.config)(parameters_of(workload))
    else:
        E = workload.config.experts
        expert = tagged_experts(E, {("gain", e): torch.tensor(float(tags.gain(e))) for e in range(E)})
    (batch,) = batches_of(workload, [(m, rank)])
    expected = second_derivatives(
        batch, direction(workload, m, rank), expert, weights_at="input" if at_input else "output"
    )
    found = seen.upstream_TD.value, seen.weights_TK.value
    unit = _ROUNDINGS * max(unit_roundoff(workload.config.dtype), unit_roundoff(torch.float32))
    place = f"rank {rank}" + (f" in microbatch {m}" if len(reading.batches) > 1 else "")
    by_upstream = Target(expected.upstream_TD, unit * expected.upstream_size_T1)
    yield _comparison(rank, seen, f"the upstream gradient of {place}", found[0], by_upstream)
    if expected.weights_TK is not None:
        by_weights = Target(expected.weights_TK, unit * expected.weights_size_TK)
        yield _comparison(rank, seen, f"the routing weights of {place}", found[1], by_weights)


def _comparison(rank: int, seen: SecondSeen, by: str, actual: Tensor | None, target: Target) -> Comparison:
    """Compare one derivative of a rank; where nothing is expected but zeros it may be None."""
    expected, whose = target.expected, f"the derivative of <dL/dx, v> by {by}"
    if actual is None:
        if not bool(expected.any()):
            return Comparison(rank, elements=expected.numel())
        cause = "" if seen.recorded else ", which asks for no gradient: its backward was not recorded"
        return Comparison(rank, f"{whose} is None{cause}; expected a tensor, or an error on every rank")
    worst = compare(actual.reshape(expected.shape), expected, target.allowed.expand(expected.shape))
    if worst.holds:
        return Comparison(rank, elements=expected.numel(), worst=worst.ratio)
    at = f"token {worst.at[0]} {'slot' if by.startswith('the routing weights') else 'column'} {worst.at[1]}"
    wrong = f"is {worst.actual:.6g} instead of {worst.expected:.6g} at {at}"
    if bool(expected.any()) and not bool(actual.any()):
        wrong = f"is zero; expected {worst.expected:.6g} at {at}, or an error on every rank"
    return Comparison(rank, f"{whose} {wrong}", worst=worst.counted)
