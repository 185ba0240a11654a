"""Judge of settings that a backend accepts: what their step computes, and whether it overlaps, on all ranks.

Every accepted setting that ran is judged as an overlapped step is, and by the oracle of a whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial

from moe_conformance.contract import Config, Settings
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.layer.layer import judge_layer_dx, judge_layer_gradients, judge_layer_outputs
from moe_conformance.judging.shared.overlapped.evidence import call_words, entries_of, judge_overlapping
from moe_conformance.judging.shared.overlapped.steps import judge_step_gradients, judge_step_tokens
from moe_conformance.judging.verdict import Costly, Mismatch, NotOffered, Raised, Tally, WrongForm
from moe_conformance.scenarios.accepted import SettingsRun
from moe_conformance.scenarios.outcome import Grad, Microbatch, RankOutcome
from moe_conformance.scenarios.overlapped import OverlapSeen
from moe_conformance.workloads.records.workload import Batch, Drawn, ParameterKey, Workload


def words_of(settings: Settings) -> str:
    """Return the settings that differ from the defaults, as text."""
    changed = (option for option in fields(settings) if getattr(settings, option.name) != option.default)
    said = [f"{option.name}={getattr(settings, option.name)!r}" for option in changed]
    return f"Settings({', '.join(said)})"


@dataclass(frozen=True)
class Accepted:
    """What became of settings on all ranks: nothing, for a reason, or a run that is judged."""

    asked: Settings
    ran: tuple[SettingsRun, ...] = ()  # by rank; empty where nothing ran
    calls: tuple[tuple[str, ...], ...] = ()  # by rank: the collectives of the first overlapped step, in words
    refused: bool = False
    why: str = ""  # nothing ran
    tally: Tally = field(default_factory=Tally)
    mismatch: Mismatch | None = None  # what is wrong with the run

    @property
    def works(self) -> bool:
        """Whether it ran, and nothing is wrong."""
        return bool(self.ran) and self.mismatch is None

    def seen(self, rank: int) -> OverlapSeen:
        """Return the record of the run on a rank."""
        found = self.ran[rank].seen
        assert found is not None
        return found


def accepted(reading: Reading) -> dict[Settings, Accepted]:
    """Return what became of all settings of a run, each judged once."""
    return once(reading, _judged)


def _judged(reading: Reading) -> dict[Settings, Accepted]:
    found = {}
    for number, call in enumerate(reading.outcome.workload.calls):
        records = tuple(rank.seen[number] for rank in reading.ranks)
        found[call.given[0]["asked"]] = _of_ranks(reading, call.given[0]["asked"], records)
    return found


def _of_ranks(reading: Reading, asked: Settings, records: tuple[SettingsRun, ...]) -> Accepted:
    """Judge one setting; the reason of the first rank is that of all, but for errors."""
    failed = [rank for rank, record in enumerate(records) if record.failed]
    idle = [rank for rank, record in enumerate(records) if record.seen is None]
    if failed:
        why = records[failed[0]].why
        sentence = f"{words_of(asked)} is accepted and {why}"
        return Accepted(asked, records, mismatch=Raised("run", sentence, ranks=tuple(failed)))
    if len(idle) not in (0, len(records)):
        sentence = f"{words_of(asked)} runs on some ranks, and not on rank {idle[0]}: {records[idle[0]].why}"
        return Accepted(asked, records, mismatch=WrongForm("run", sentence, ranks=tuple(idle)))
    if idle:
        return Accepted(asked, refused=all(record.ran is None for record in records), why=records[0].why)
    tally = Tally()
    mismatch = _mismatch(_reading_of(reading, records), records[0], tally)
    calls = tuple(_calls(rank, record) for rank, record in zip(reading.ranks, records, strict=True))
    return Accepted(asked, records, calls, tally=tally, mismatch=mismatch)


def _calls(rank: RankOutcome, record: SettingsRun) -> tuple[str, ...]:
    assert record.seen is not None
    return tuple(map(call_words, entries_of(rank, record.seen.overlapped[0])))


def _mismatch(run: Reading, record: SettingsRun, tally: Tally) -> Mismatch | None:
    """Return what is wrong with a run, None if nothing is; what is not offered is left out."""
    for judge in _judges(record):
        try:
            judge(run, tally)
        except NotOffered:
            continue
        except Mismatch as error:
            error_of = partial(type(error), ranks=error.ranks, ratio=error.ratio)
            return error_of(error.stage, f"{words_of(record.asked)} is accepted, and {error.sentence}")
    return None


def _judges(record: SettingsRun) -> Iterator[Callable[[Reading, Tally], None]]:
    yield judge_layer_outputs
    yield judge_step_tokens
    yield lambda run, tally: judge_step_gradients(run, tally, "first", "second", finished=False)
    if record.ran is not None and record.ran.overlap:
        yield _judge_overlap
    yield judge_layer_dx
    yield judge_layer_gradients
    yield lambda run, tally: judge_step_gradients(run, tally, "first", "second", finished=True)


def _judge_overlap(run: Reading, tally: Tally) -> None:
    """Decide whether settings that resolve to overlap run with an exchange in flight.

    Raises:
        Costly: none is, or the step claims that it overlaps nothing.
        NotOffered: the collectives are not recorded: it is unproved.
    """
    if run.claims.overlap == "no":
        raise Costly("run", "its step claims overlap = 'no', where `resolve` returned overlap=True")
    judge_overlapping(run, tally)


_OPTIONS = ("defer_weight_gradients", "recompute", "prediction_layers", "capture", "offload_first_product")


def judge_options(reading: Reading, tally: Tally) -> None:
    """Decide whether overlap with a further option, where it is accepted, gives the values of the sequential step.

    Raises:
        NotOffered: no such option is accepted and can be run; the reason is that of the first.
        Mismatch: what is wrong with a step.
    """
    beside = [
        found
        for settings, found in accepted(reading).items()
        if settings.overlap and any(getattr(settings, name) != getattr(Settings(), name) for name in _OPTIONS)
    ]
    ran = [found for found in beside if found.ran]
    for found in ran:
        if found.mismatch is not None:
            tally.beyond = max(tally.beyond, found.tally.beyond)
            raise found.mismatch
        tally.include(found.tally)
    if not ran:
        first = next((found for found in beside if not found.refused), None)
        why = "all are refused" if first is None else f"{words_of(first.asked)} is accepted, and not run: {first.why}"
        raise NotOffered(f"of the options beside overlap none runs; {why}")


# ---- the run of one setting as a run of its own ------------------------------------------------------------------


def _reading_of(reading: Reading, records: tuple[SettingsRun, ...]) -> Reading:
    """Return the first overlapped step with some settings as a run of a layer."""
    outcome = reading.outcome
    workload = _workload_of(outcome.workload, records[0])
    ranks = tuple(_rank_of(rank, record) for rank, record in zip(reading.ranks, records, strict=True))
    return Reading(replace(outcome, workload=workload, ranks=ranks), ranks)


def _workload_of(workload: Workload, record: SettingsRun) -> Workload:
    """Return the workload in the dtype of the settings, with their number of shared experts."""
    ran = record.ran
    assert ran is not None
    shared = {"shared.ffn": (workload.config.ffn,) * ran.shared_experts}
    config: Config = workload.config.changed({"dtype": ran.dtype, **shared})
    parameters = {
        _bare(key): value.to(ran.dtype)
        for key, value in workload.parameters.items()
        if ran.shared_experts or not _bare(key)[0].startswith("shared")
    }

    def batch(m: int, rank: int) -> Batch:
        drawn = workload.batches[m][rank]
        return replace(drawn, x_TD=drawn.x_TD.to(ran.dtype), upstream=drawn.upstream.to(ran.dtype))

    name = f"{workload.name} {words_of(ran)}"
    batches = Drawn(workload.tokens, batch)
    return replace(workload, name=name, config=config, batches=batches, parameters=parameters, calls=())


def _rank_of(rank: RankOutcome, record: SettingsRun) -> RankOutcome:
    assert record.seen is not None
    first = record.seen.overlapped[0]
    return replace(
        rank,
        microbatches=tuple(
            Microbatch(y=y, y_shape=tuple(y.shape), y_dtype=y.dtype, dx_TD=dx_TD, dweights_TK=Grad(None))
            for y, dx_TD in zip(first.y, first.dx_TD, strict=True)
        ),
        grads_local={_bare(key): grad for key, grad in first.local.items()},
        grads_final=None if first.final is None else {_bare(key): grad for key, grad in first.final.items()},
        uncovered=record.uncovered,
        claims=record.claims,
        loss_convention=record.loss_convention,
        seen=record.seen,
    )


def _bare(key: ParameterKey) -> ParameterKey:
    return key[0].removeprefix("layer0/"), key[1]
