"""What a simulated run brought back beside what its judges expect, and ways to make it wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.observed.scopes import places_of, shard_of
from moe_conformance.judging.shared.experts.experts import expected_of as experts_expected
from moe_conformance.judging.shared.router.routers import expected_of as router_expected
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Batch

Compared = tuple[str, Tensor, Target]  # what it is, actual, target


def experts_compared(outcome: Outcome) -> Iterator[Compared]:
    """List everything that is bounded in a run with real experts."""
    reading = read(outcome)
    expected = experts_expected(reading)
    for m, rank in places_of(outcome.workload, range(outcome.workload.layout.world)):
        seen = reading.seen(m, rank)
        yield "y", present(seen.y), expected.y((m, rank))
        yield "dx", present(seen.dx_TD.value), expected.dx((m, rank))
        yield "dweights", present(seen.dweights_TK.value), expected.dweights((m, rank))
    for outcome_of in reading.ranks:
        for (name, expert), grad in (outcome_of.grads_final or {}).items():
            assert expert is not None
            target = expected.parameter(expected.stage_of[outcome_of.rank], (name, expert))
            yield name, present(grad.value), Target(*(shard_of(each, grad.shard) for each in target))


def router_compared(outcome: Outcome) -> Iterator[Compared]:
    """List everything that is bounded in a run of routers."""
    reading = read(outcome)
    expected = router_expected(reading)
    for m, rank in expected.places:
        seen = reading.seen(m, rank)
        yield "weights", present(seen.router.weights_TK), expected.weights((m, rank))
        yield "dx", present(seen.dx_TD.value), expected.dx((m, rank))
    for outcome_of in reading.ranks:
        yield "router", present((outcome_of.grads_final or {})["router", None].value), expected.gradient(0)


def present(value: Tensor | None) -> Tensor:
    """Refuse an absent tensor."""
    assert value is not None
    return value


def worst_of(compared: Iterator[Compared]) -> tuple[float, int]:
    """Return the largest observed / allowed error, and how many elements there were."""
    found = [(compare(actual, *target).ratio, actual.numel()) for _, actual, target in compared]
    return max(ratio for ratio, _ in found), sum(elements for _, elements in found)


def share_found(compared: Iterator[Compared], *names: str) -> float:
    """Return the share of tokens (rows) and of parameters (whole) in which some element exceeds its bound."""
    found = []
    for name, actual, (expected, allowed) in compared:
        if name in names and name in ("gate", "up", "down"):
            found.append(not compare(actual, expected, allowed).holds)
        elif name in names:
            found += [not compare(*row).holds for row in zip(actual, expected, allowed, strict=True)]
    return sum(found) / len(found)


def drop_a_slot(batch: Batch) -> Batch:
    """Empty the first slot of every token."""
    ids_TK = batch.ids_TK.clone()
    ids_TK[:, 0] = -1
    return replace(batch, ids_TK=ids_TK)


def double_a_slot(batch: Batch) -> Batch:
    """Let the first slot of every token weigh twice."""
    weights_TK = batch.weights_TK.clone()
    weights_TK[:, 0] *= 2
    return replace(batch, weights_TK=weights_TK)


def change_an_expert(batch: Batch) -> Batch:
    """Send the first slot of every token to the next of 8 experts."""
    ids_TK = batch.ids_TK.clone()
    ids_TK[:, 0] = (ids_TK[:, 0] + 1) % 8
    return replace(batch, ids_TK=ids_TK)
