"""All judges of a run, called in order on the outcome of a randomly drawn batch.

The order is that in which faults become visible. The first fault is raised in an exception type of its own (see
`mismatch_types`), with the requirement that it violates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from moe_conformance.contract import Config
from moe_conformance.judging.mismatch_types import of_its_own_kind
from moe_conformance.judging.observed.aliasing import (
    judge_finished,
    judge_kept_gradients,
    judge_kept_outputs,
    judge_state,
)
from moe_conformance.judging.observed.ledgers import judge_agreement
from moe_conformance.judging.observed.run import Reading, read
from moe_conformance.judging.shared.exchange.counts import judge_counts
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_inputs, judge_outputs
from moe_conformance.judging.shared.exchange.row_gradients import judge_out_gradients, judge_rows_gradients
from moe_conformance.judging.shared.exchange.weights import judge_weights
from moe_conformance.judging.shared.router.routers import (
    judge_bias,
    judge_group_limit,
    judge_load,
    judge_router_dx,
    judge_router_gradient,
    judge_router_weights,
    judge_selection,
)
from moe_conformance.judging.verdict import Indecisive, MalformedClaim, Mismatch, NotOffered, Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.runs import ExchangeStep

Judge = Callable[[Reading, Tally], None]


class Special(NamedTuple):
    """A requirement that applies to some configurations only, decided together with a general one."""

    requirement: str
    applies: Callable[[Config], bool]
    judge: Judge  # counts the elements in which the special requirement makes a difference


class Judgement(NamedTuple):
    """A judge, the general requirement that it decides, and its special requirements.

    A violation is attributed to the first special requirement that applies to the configuration: the smallest failing
    batch has no groups, bias, scale or normalisation unless the fault needs them.
    """

    requirement: str
    judge: Judge
    special: tuple[Special, ...] = ()

    def violated(self, config: Config) -> str:
        """Return the requirement that a violation under this configuration is attributed to."""
        return next((extra.requirement for extra in self.special if extra.applies(config)), self.requirement)


def _judge_agreement(reading: Reading, tally: Tally) -> None:
    judge_agreement(reading.outcome, tally)


PROBE = (
    Judgement("EXCH-09", judge_finished),
    Judgement("EXCH-12", _judge_agreement),
    Judgement("EXCH-01", judge_deliveries),
    Judgement("EXCH-02", judge_rows),
    Judgement("EXCH-03", judge_weights),
    Judgement("EXCH-04", judge_counts),
    Judgement("EXCH-05", judge_outputs),
    Judgement("EXCH-07", judge_form),
    Judgement("EXCH-08", judge_inputs),
    Judgement("EXCH-11", judge_state),
    Judgement("GRAD-01", judge_out_gradients),
    Judgement("GRAD-02", judge_rows_gradients),
    Judgement("GRAD-02", judge_dx),
    Judgement("GRAD-03", judge_dweights),
    Judgement("GRAD-07", judge_kept_gradients),
    Judgement("EXCH-32", judge_kept_outputs),
)

_GROUPS = Special("ROUTE-04", lambda config: config.routing.groups is not None, judge_group_limit)
_BIAS = Special("ROUTE-03", lambda config: config.routing.balance_bias, judge_bias)
_SCALE = Special("ROUTE-06", lambda config: config.routing.scale != 1, judge_router_weights)
_NORMALISED = Special("ROUTE-05", lambda config: config.routing.normalise, judge_router_weights)

ROUTE = (
    Judgement("ROUTE-01", judge_selection, (_GROUPS, _BIAS)),
    Judgement("ROUTE-02", judge_router_weights, (_SCALE, _NORMALISED, _BIAS)),
    Judgement("ROUTE-07", judge_router_dx),
    Judgement("ROUTE-08", judge_router_gradient),
    Judgement("ROUTE-09", judge_load),
)


def decided_by(judgements: tuple[Judgement, ...]) -> tuple[str, ...]:
    """Return the ids of all requirements that the judgements may decide.

    >>> decided_by(ROUTE)[:3]
    ('ROUTE-01', 'ROUTE-02', 'ROUTE-03')
    """
    special = {extra.requirement for judgement in judgements for extra in judgement.special}
    return tuple(sorted(special | {judgement.requirement for judgement in judgements}))


def judge_batch(outcome: Outcome, tally: Tally) -> None:
    """Decide whether an outcome passes all judges of its kind of run, and record which requirements they decided.

    Raises:
        Mismatch: the first fault.
    """
    config = outcome.workload.config
    probe = outcome.workload.run == ExchangeStep()
    try:
        with _typed_mismatch(read, "EXCH-09" if probe else None):
            reading = read(outcome)
    except NotOffered:
        return  # the rows of this example cannot be identified, those of other examples can
    judgements = PROBE if probe else ROUTE
    for judgement in judgements:
        # one rank calls no collective, weights that are applied in combine do not travel, loads need not be reported
        with suppress(NotOffered), _typed_mismatch(judgement.judge, judgement.violated(config)):
            _count(judgement.requirement, judgement.judge, reading, tally)
    for special in dict.fromkeys(special for judgement in judgements for special in judgement.special):
        if special.applies(config):
            with suppress(Indecisive):  # no choice of this example depends on it
                _count(special.requirement, special.judge, reading, tally)


def _count(requirement: str, judge: Judge, reading: Reading, tally: Tally) -> None:
    counted = Tally()
    try:
        judge(reading, counted)
    except Mismatch as mismatch:
        mismatch.size = counted.beyond or None
        raise
    tally.include(counted)
    if not counted.vacuous:
        tally.decided.add(requirement)


@contextmanager
def _typed_mismatch(judge: Callable[..., object], requirement: str | None) -> Iterator[None]:
    """Raise a mismatch of the block in its own type (see `mismatch_types`), with the requirement that it violates."""
    try:
        yield
    except Mismatch as mismatch:
        typed = of_its_own_kind(mismatch, judge.__name__)
        typed.requirement = "EXCH-04" if isinstance(mismatch, MalformedClaim) else requirement
        raise typed from mismatch
