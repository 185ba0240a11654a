"""Judges of parameters and moments after the steps of a script, also of those that are skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.chapters.training.judge.expected import PARAMETERS, Expected, of_state, said, seen, shards
from moe_conformance.chapters.training.judge.mistakes import of_step
from moe_conformance.judging.compare.bounded import Target, Worst, compare, factor, within
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, ratio_names, ratio_words
from moe_conformance.judging.observed.scopes import Shard, shard_of, whole
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.verdict import MOST, Deviation, WrongParameter
from moe_conformance.reference.training.model import Key
from moe_conformance.scenarios.outcome import Outcome

GRADIENTS = "gradients"  # a quantity, as `quantity` names others

_CALLED = {PARAMETERS: "parameters", "first": "first moments", "second": "second moments", "momentum": "momenta"}


@judge(WrongParameter, "finish")
def judge_steps(outcome: Outcome) -> Comparisons:
    """Decide whether parameters, and what the optimiser keeps of them, are those of one device after every step.

    Raises:
        WrongParameter: one of them differs, or is on no rank.
    """
    expected = Expected.of(outcome)
    yield from _everywhere(outcome, expected)
    yield from _until_wrong(outcome, expected)


@judge(WrongParameter, "finish")
def judge_first_kept(outcome: Outcome) -> Comparisons:
    """Decide whether the optimiser was given the right gradient in the first step, by what it keeps of it.

    Raises:
        WrongParameter: it was not.
    """
    expected = Expected.of(outcome)
    for what in expected.kept:
        yield from _compared(outcome, expected, 0, what, of_gradients=what != "second")


@judge(WrongParameter, "finish")
def judge_idle(outcome: Outcome) -> Comparisons:
    """Decide whether experts without tokens are decayed, and what is kept of them is updated.

    Raises:
        WrongParameter: one of them is not.
    """
    yield from _until_wrong(outcome, Expected.of(outcome), idle=True)


@judge(WrongParameter, "finish")
def judge_skipped(outcome: Outcome) -> Comparisons:
    """Decide whether steps that are not finite are skipped by all ranks, or by none, and leave everything as it was.

    Raises:
        WrongParameter: ranks differ, or a skipped step changed something.
    """
    expected = Expected.of(outcome)
    claimed = outcome.ranks[0].claims.steps_not_finite
    for step, each in enumerate(expected.steps):
        odd = not bool(each.norm.isfinite())
        right = not odd or claimed == "taken"
        for rank, updated in enumerate(values(outcome, step, "updated")):
            did, should = ("took", "skip") if updated else ("skipped", "take")
            why = "the gradient of a rank is not finite" if odd else "every gradient is finite"
            words = f"rank {rank} {did} step {step}; expected: to {should} it on every rank, since {why}"
            yield Comparison(rank, words if updated != right else "", pairs=1, kind="updated")
        if odd and claimed == "taken":
            yield from _taken(outcome, step)
            return  # nothing is left to be judged
        if odd:
            yield from _unchanged(outcome, step)
        else:
            for what in (PARAMETERS, *expected.kept):
                yield from _compared(outcome, expected, step, what)


def _until_wrong(outcome: Outcome, expected: Expected, *, idle: bool = False) -> Iterator[Comparison]:
    """Compare step by step up to the first that is wrong, from which the next ones follow."""
    for step in range(len(expected.steps)):
        only = expected.idle(step) if idle else None
        found = [
            each for what in (PARAMETERS, *expected.kept) for each in _compared(outcome, expected, step, what, only)
        ]
        yield from found
        if any(each.findings() for each in found):
            return


def _taken(outcome: Outcome, step: int) -> Iterator[Comparison]:
    """Look on every rank for parameters that are not finite: a gradient that is not finite leaves such ones."""
    for rank, after in enumerate(seen(outcome, step, PARAMETERS)):
        finite = all(bool(value.isfinite().all()) for value in after.values())
        words = (
            f"rank {rank}: every parameter is finite after step {step}, whose gradient is not; expected: the step is "
        )
        words += "taken, as the backend claims steps_not_finite = 'taken'"
        yield Comparison(rank, words if finite else "", pairs=1, kind="taken")


def _unchanged(outcome: Outcome, step: int) -> Iterator[Comparison]:
    """Compare what is there after a step, bit for bit, with what was there before it."""
    names = sorted({name for each in values(outcome, step, "kept") for name in each})
    for what in (PARAMETERS, *names):
        pairs = zip(seen(outcome, step - 1, what), seen(outcome, step, what), strict=True)
        for rank, (before, after) in enumerate(pairs):
            changed = [key for key in after if key not in before or not torch.equal(before[key], after[key])]
            words = f"rank {rank}: skipped step {step} changed {_CALLED.get(what, what)}" if changed else ""
            words += f", {said(changed[0])} for one ({len(changed)} of {len(after)})" if changed else ""
            elements = sum(value.numel() for value in after.values())
            yield Comparison(rank, words, elements=0 if changed else elements, kind="changed")


def _everywhere(outcome: Outcome, expected: Expected) -> Iterator[Comparison]:
    """Compare the names on all ranks with those of the model: every parameter is whole, and there is no other."""
    found: dict[Key, list[Shard]] = {}
    for of_rank in shards(outcome, 0):
        for key, shard in of_rank.items():
            found.setdefault(key, []).append(shard)
    for key in sorted({*expected.workload.parameters, *found}, key=str):
        words = ""
        if key not in expected.workload.parameters:
            words = f"{said(key)} is trained, and the model has no such parameter"
        elif not whole(found.get(key, [])):
            words = f"{said(key)} is not whole on any ranks: of its shards there are {found.get(key, [])}"
        yield Comparison(None, words, pairs=1, kind="everywhere")


def quantity(what: str, steps: int) -> str:
    """Return the name under which a report shows what is there after some steps, such as `moments after 1 step`."""
    return f"{what if what == PARAMETERS else 'moments'} after {steps} step{'s' if steps > 1 else ''}"


def _compared(
    outcome: Outcome,
    expected: Expected,
    step: int,
    what: str,
    only: Sequence[Key] | None = None,
    *,
    of_gradients: bool = False,
) -> Iterator[Comparison]:
    """Compare what ranks have after a step: of each rank all at once.

    `of_gradients`: a report shows it as that of the gradients, of which what is kept after the first step is a
    multiple.
    """
    name = GRADIENTS if of_gradients else quantity(what, step + 1)
    by_rank, of_ranks = seen(outcome, step, what), shards(outcome, step)
    for rank, (found, held) in enumerate(zip(by_rank, of_ranks, strict=True)):
        keys = [key for key in held if only is None or key in only]
        absent = [key for key in keys if key not in found]
        if absent:
            words = f"rank {rank} keeps no {_CALLED[what]} of {said(absent[0])} after step {step}"
            words += f" ({len(absent)} of {len(keys)} parameters)"
            words += "; likely cause: it had no gradient, and the optimiser left it out"
            yield Comparison(rank, words, kind=f"no {what}", deviation=Deviation(name, MOST, said(absent[0])))
            continue
        if not keys:
            continue
        targets = {key: expected.after(step, what, key, held[key]) for key in keys}
        worst = {key: compare(found[key].double(), *targets[key]) for key in keys}
        elements = sum(value.numel() for value in (found[key] for key in keys))
        largest = max(keys, key=lambda key: worst[key].size)
        deviation = Deviation(name, worst[largest].size, said(largest))
        if worst[largest].holds:
            yield Comparison(rank, elements=elements, worst=worst[largest].counted, deviation=deviation)
            continue
        wrong = {key: each for key, each in worst.items() if not each.holds}
        yield _wrong(expected, step, what, rank, {key: found[key].double() for key in keys}, held, wrong, deviation)


def _wrong(
    expected: Expected,
    step: int,
    what: str,
    rank: int,
    found: dict[Key, Tensor],
    held: dict[Key, Shard],
    wrong: dict[Key, Worst],
    deviation: Deviation,
) -> Comparison:
    key = max(wrong, key=lambda each: wrong[each].size)
    words = f"rank {rank}: of {_CALLED[what]} after step {step} {said(key)} is {wrong[key]}"
    words += f"; {len(wrong)} of {len(found)} are wrong"
    names = _names(expected)
    ratio = factor(*_changes(expected, step, what, list(wrong), found, held), names)
    times = "" if ratio is None else ratio_words(ratio, names)
    if cause := _cause(expected, step, what, rank, found, held, list(wrong), times, named=ratio in names.values()):
        words += f"; likely cause: {cause}"
    fault = Finding(what, words, (rank,), wrong[key].size)
    return Comparison(rank, fault, worst=wrong[key].counted, deviation=replace(deviation, factor=times))


def _cause(
    expected: Expected,
    step: int,
    what: str,
    rank: int,
    found: dict[Key, Tensor],
    held: dict[Key, Shard],
    wrong: list[Key],
    times: str,
    *,
    named: bool,
) -> str:
    """Return what explains all that is wrong, in words: a factor, no update at all, or a mistake of the step.

    `times` is the factor in words, "" if there is none; one that is `named` explains more than a mistake would.
    """
    before = expected.state_before(step)
    of_key = {key: shard_of(of_state(before, what, key), held[key]) for key in wrong}
    targets = {key: expected.after(step, what, key, held[key]) for key in wrong}
    kinds = {key[1] is None for key in wrong}
    whose = "" if len(kinds) == 2 else "dense " if kinds == {True} else "expert "
    undecayed = expected.optimiser.rate * expected.optimiser.decay
    if what == PARAMETERS and undecayed and expected.workload.config.training.optimiser == "adamw":
        guesses = {key: targets[key].expected + undecayed * of_key[key] for key in wrong}
        if all(within(found[key], guesses[key], targets[key].allowed) for key in wrong):
            return f"these {whose}parameters were not decayed"
    if all(within(found[key], of_key[key], targets[key].allowed) for key in wrong):
        return f"these {whose}parameters were left out of the step, of decay and of moments"
    if what == PARAMETERS and all(_partly(found[key], of_key[key], targets[key]) for key in wrong):
        return "every element that is wrong is as before the step: its shards of the update were not gathered"
    changed = "the change" if what == PARAMETERS else "what the gradient adds to those"
    told = f"{changed} of these {whose}parameters is {times}" if times else ""
    if named:
        return told
    for words, made in of_step(expected, step, rank):
        after = made()
        guesses = {key: shard_of(of_state(after, what, key), held[key]) for key in wrong}
        if all(within(found[key], guesses[key], _larger(targets[key], guesses[key])) for key in wrong):
            return words
    return told or _moved(found, targets, [key for key in wrong if key[1] is not None])


def _partly(found: Tensor, before: Tensor, target: Target) -> bool:
    """Whether all elements that are wrong are as they were before."""
    right = (found - target.expected).abs() <= target.allowed
    return bool((right | ((found - before).abs() <= target.allowed)).all())


def _moved(found: dict[Key, Tensor], targets: dict[Key, Target], keys: list[Key]) -> str:
    """Return words if parameters have the expected values in another order; "" if not, or there are none.

    Those of experts, of which every rank of an ep group has its own.
    """
    if not keys:
        return ""
    values = torch.cat([found[key].flatten() for key in keys]).sort().values
    expected = torch.cat([targets[key].expected.flatten() for key in keys]).sort().values
    allowed = max(float(targets[key].allowed.max()) for key in keys)
    if not bool(((values - expected).abs() <= allowed).all()):
        return ""
    return "each element has the value of another one, as if shards had been exchanged"


def _changes(
    expected: Expected, step: int, what: str, keys: list[Key], found: dict[Key, Tensor], held: dict[Key, Shard]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the step changed, what it should have, and the allowed errors; of what is kept, by the gradient."""
    targets = {key: expected.after(step, what, key, held[key]) for key in keys}
    less = {key: shard_of(_without_gradient(expected, step, what, key), held[key]) for key in keys}
    return (
        torch.cat([(found[key] - less[key]).flatten() for key in keys]),
        torch.cat([(targets[key].expected - less[key]).flatten() for key in keys]),
        torch.cat([targets[key].allowed.flatten() for key in keys]),
    )


def _without_gradient(expected: Expected, step: int, what: str, key: Key) -> Tensor:
    """Return a parameter before a step, or what would be kept of it after a gradient of zeros."""
    before = expected.state_before(step)
    theta = before.parameters[key]
    if what == PARAMETERS:
        return theta
    _, kept = expected.optimiser.update(theta, torch.zeros_like(theta), before.kept[key], step + 1)
    return kept[what]


def _larger(target: Target, guess: Tensor) -> Tensor:
    """Return the allowed error of a guess, which may be larger than what was expected."""
    scale = guess.abs() / target.expected.abs().clamp_min(1e-30)
    return target.allowed * scale.clamp(1.0, 1e3) * 2


def _names(expected: Expected) -> dict[str, float]:
    workload = expected.workload
    sizes: dict[str, float] = {**workload.layout.sizes()}
    return ratio_names(sizes | {"microbatches": len(workload.calls[0].given[0]["batches"])})
