"""Build the surfaces of a training step for one workload and write the workload's parameters into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_conformance.contract import (
    Capacity,
    Config,
    Exchange,
    ExpertFn,
    Layer,
    Parametrised,
    Router,
    Session,
    SplitExchange,
    Unsupported,
)
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.identity import identity_of
from moe_conformance.scenarios.probe import Probe, part_of
from moe_conformance.scenarios.reported import without_noise
from moe_conformance.scenarios.routed_exchange import exchange_of
from moe_conformance.scenarios.sessions import Opened, build, recorded
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep, LayerStep, RouterStep
from moe_conformance.workloads.records.schedule import executes
from moe_conformance.workloads.records.workload import ParameterKey, Workload


@dataclass(frozen=True)
class Built:
    """The surfaces that a training step calls: routers, or a layer, or an exchange and experts.

    Attributes:
        parametrised: The surfaces whose gradients are judged.
        routers: Routers of the same config, as in several layers.
        undropping: The same router without a capacity.
        warned: The warnings that were raised while the routers were built.
        hooked: The hooks on parameters, by surface, if the workload has hooks.
        buffered: The parameters that had a gradient right after the build, before any backward.
    """

    session: Session
    parametrised: Sequence[Parametrised] = ()
    routers: Sequence[Router] = ()
    undropping: Router | None = None
    exchange: Exchange | SplitExchange | None = None
    experts: ExpertFn | None = None
    layer: Layer | None = None
    warned: tuple[str, ...] = ()
    hooked: Sequence[parameters.Hooked] = ()
    buffered: frozenset[ParameterKey] = frozenset()


def build_all(kept: Opened, workload: Workload) -> Built:
    """Build the surfaces that the workload's run calls and write the parameters.

    Raises:
        Unsupported: the backend does not offer a surface, or not with this config.
    """
    if isinstance(workload.run, RouterStep):
        built = _routers(kept.session, workload)
    elif isinstance(workload.run, LayerStep):
        layer = build(kept.session, "layer", workload.config)
        built = Built(kept.session, parametrised=(layer,), layer=layer)
    else:
        built = _exchange_and_experts(kept, workload)
    for surface in built.parametrised:
        parameters.write(surface, workload.parameters)
    if workload.twist.hooked:
        built = replace(built, hooked=[parameters.hook(surface) for surface in built.parametrised])
    for noisy in (*built.routers, built.undropping, built.layer):
        if noisy is not None and not workload.config.jitter:
            without_noise(noisy)
    if "parameters" in workload.twist.unasked:
        built = replace(built, buffered=_buffered(built))
        for surface in built.parametrised:
            parameters.unask(surface)
    return built


def _routers(session: Session, workload: Workload) -> Built:
    """Build the routers of the workload, and one without a capacity if the run compares with that."""
    assert isinstance(workload.run, RouterStep)
    with recorded() as warned:
        routers = [session.router(workload.config) for _ in range(workload.routers)]
    undropping = session.router(_without_capacity(workload.config)) if workload.run.capacity else None
    for other in (*routers[1:], undropping):
        if other is not None:
            parameters.write(other, workload.parameters)
    return Built(session, parametrised=routers[:1], routers=routers, undropping=undropping, warned=tuple(warned))


def _exchange_and_experts(kept: Opened, workload: Workload) -> Built:
    """Build an exchange, with experts of the backend or of the suite."""
    exchange, run = exchange_of(kept.session, workload), workload.run
    if executes(workload.schedule, "dispatch") and not isinstance(exchange, SplitExchange):
        raise Unsupported("this exchange has no halves to interleave")
    if isinstance(run, ExpertsStep):
        experts = kept.session.experts(workload.config)
        return Built(kept.session, parametrised=(experts,), exchange=exchange, experts=experts)
    assert isinstance(run, ExchangeStep)
    if run.answered != "probe":
        return Built(kept.session, exchange=exchange, experts=identity_of(kept.session, kept.topology))
    answers = tuple(exchange.local_experts)
    if workload.twist.probe_as:
        answers = tuple(workload.twist.probe_as[expert] for expert in answers)
    probe = Probe(workload.config, answers, part_of(kept.session, kept.topology))
    return Built(kept.session, exchange=exchange, experts=probe)


def _buffered(built: Built) -> frozenset[ParameterKey]:
    """Return the parameters that have a gradient before any backward."""
    made = parameters.gradients(built.parametrised, built.session.grad_attr)
    return frozenset(key for key, grad in made.items() if grad.value is not None)


def _without_capacity(config: Config) -> Config:
    """Return a copy of the config without a capacity."""
    return replace(config, capacity=Capacity())
