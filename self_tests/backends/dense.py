"""What a run must yield, by the dense oracle alone: the tests of adapters do not lean on the judge."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.reference.exchange import layer
from moe_conformance.reference.experts import swiglu_experts, tagged_experts
from moe_conformance.reference.routing.routes import Routed, route
from moe_conformance.reference.shared_experts import whole_layer
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.scenarios.parameters import shard_of
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Workload


def oracle(workload: Workload) -> layer.Gradients:
    """All tokens of all microbatches and ranks, in this order, in one dense batch."""
    batches = [layer.Batch(b.x_TD, b.ids_TK, b.weights_TK, b.upstream) for ranks in workload.batches for b in ranks]
    if isinstance(workload.run, ExpertsStep):
        return layer.gradients(*layer.global_batch(batches), build=swiglu_experts, parameters=workload.parameters)
    E = workload.config.experts
    gains = {("gain", e): torch.tensor(tags.gain(e)) for e in range(E)}
    build = lambda parameters: tagged_experts(E, parameters)  # noqa: E731
    return layer.gradients(*layer.global_batch(batches), build=build, parameters=gains)


def seen(outcome: Outcome) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dweights in the order of `oracle`, in float64."""
    count = len(outcome.workload.batches)
    found = [rank.microbatches[m] for m in range(count) for rank in outcome.ranks]
    parts = [(each.y, each.dx_TD.value, each.dweights_TK.value) for each in found]
    y, dx, dweights = (
        torch.cat([part.double() for part in column if part is not None]) for column in zip(*parts, strict=True)
    )
    return y, dx, dweights


def assert_equal_to_the_bit(outcome: Outcome) -> None:
    """Output and gradients of a run equal the dense formulation, bit for bit."""
    expected, (y, dx, dweights) = oracle(outcome.workload), seen(outcome)
    assert torch.equal(expected.y_TD, y)
    assert torch.equal(expected.dx_TD, dx)
    assert torch.equal(expected.dweights_TK, dweights)


def assert_routed_alike(outcome: Outcome, allowed: float, router_ED: Tensor | None = None) -> list[Routed]:
    """In their first microbatch, routers of all ranks chose the same experts, in any order, and weighed them alike.

    Returns the oracle's answers by rank, differentiable in the router in float64 where that is given.
    """
    workload, config, routes = outcome.workload, outcome.workload.config, []
    router_ED = workload.parameters["router", None].double() if router_ED is None else router_ED
    for rank, batch in zip(outcome.ranks, workload.batches[0], strict=True):
        found = rank.microbatches[0]
        assert found.router.ids_TK is not None
        assert found.router.weights_TK is not None
        expected = route(
            batch.x_TD.double() @ router_ED.T,
            top_k=config.top_k,
            score=config.routing.score,
            bias_E=workload.parameters.get(("balance_bias", None)),
            groups=config.routing.groups,
            group_score=config.routing.group_score,
            normalise=config.routing.normalise,
            scale=config.routing.scale,
        )
        order, sorted_ids = expected.ids_TK.argsort(1), found.router.ids_TK.argsort(1)
        assert torch.equal(expected.ids_TK.gather(1, order), found.router.ids_TK.gather(1, sorted_ids))
        weights_TK = found.router.weights_TK.gather(1, sorted_ids)
        assert worst(weights_TK, expected.weights_TK.detach().gather(1, order)) < allowed
        routes.append(expected)
    return routes


def assert_layer_alike(outcome: Outcome, *, divisor: int, allowed: float) -> None:
    """Outputs of a layer are the oracle's, and so is every part of its parameters' gradients, divided; all are held."""
    config, (batches,), parameters = outcome.workload.config, outcome.workload.batches, outcome.workload.parameters
    x_TD, dy_TD = torch.cat([batch.x_TD for batch in batches]), torch.cat([batch.upstream for batch in batches])
    logits_TE = x_TD.double() @ parameters["router", None].double().T
    ids_TK = route(logits_TE, top_k=config.top_k, score=config.routing.score).ids_TK
    weighing = whole_layer.Weighing(config.routing.score, config.routing.normalise, config.routing.scale)
    expected = whole_layer.gradients(x_TD, ids_TK, dy_TD, parameters, weighing)
    outputs = [rank.microbatches[0].y for rank in outcome.ranks]
    assert worst(torch.cat([y_TD for y_TD in outputs if y_TD is not None]), expected.y_TD) < allowed
    largest = max(float(value.abs().max()) for value in expected.parameters.values())
    held = dict.fromkeys(expected.parameters, 0)
    for rank in outcome.ranks:
        for key, grad in (rank.grads_final or {}).items():
            assert grad.value is not None, key
            wanted = shard_of(expected.parameters[key], grad.shard) / divisor
            assert float((grad.value.double() - wanted).abs().max()) / largest * divisor < allowed, key
            held[key] += grad.value.numel()
    short = [key for key, elements in held.items() if elements % expected.parameters[key].numel() or not elements]
    assert [] == short


def worst(actual: Tensor, expected: Tensor) -> float:
    """The largest error, in units of the largest expected value."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())
