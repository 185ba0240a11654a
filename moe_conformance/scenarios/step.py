"""Run training steps of a backend on one rank: build, follow a schedule, finish the gradients; mostly one step.

Four kinds of run share it: the suite's probe expert inside the backend's exchange, the backend's experts, its router
alone, or a whole layer. A router with a capacity is compared with the same router without one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.contract import (
    Claims,
    Delivery,
    ExpertFn,
    Overflow,
    Routing,
    Session,
    SplitExchange,
    Unsupported,
    whole,
)
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters, state
from moe_conformance.scenarios.built import build_all
from moe_conformance.scenarios.identity import Identity
from moe_conformance.scenarios.in_flight import InFlight
from moe_conformance.scenarios.inputs import Inputs
from moe_conformance.scenarios.memory import bytes_in_use, longer, take_and_forget
from moe_conformance.scenarios.outcome import ExchangeSeen, Finish, Microbatch, RankOutcome, RouterSeen
from moe_conformance.scenarios.padding import PaddingGradients
from moe_conformance.scenarios.probe import Probe
from moe_conformance.scenarios.recomputing import exchange_again, experts_again, router_again
from moe_conformance.scenarios.reported import claims_of, claims_of_all, optional_of, shown_of
from moe_conformance.scenarios.routed_exchange import RoutedExchange
from moe_conformance.scenarios.sessions import opened
from moe_conformance.scenarios.tensors import to_cpu
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.schedule import BEGIN_TRAINING, Operation, operations
from moe_conformance.workloads.records.workload import Workload


class TrainingStep:
    """The scenario of training steps: the state of one run on one rank."""

    def __init__(self, context: RankContext, workload: Workload) -> None:
        """Store the arguments; nothing runs yet."""
        self.context, self.workload, self.config = context, workload, workload.config
        self.reached = "open"
        self.phases: list[tuple[str, int]] = []
        self.ended: list[Finish] = []  # steps, in order
        self.went_back = False  # whether a backward ran in the present step
        self.live_groups: list[int] = []  # after each backward
        self.bytes_in_use: list[int | None] = []  # after each repeated step
        self.beside: list[TrainingStep] = []  # other runs, interleaved with this one
        self.flights: dict[int, InFlight] = {}  # by microbatch
        self.state_changed: list[str] = []
        self.hidden: Sequence[str] = ()  # what the backend was built without

    def run(self, backend_name: str) -> RankOutcome:
        """Run the steps and return the record of this rank."""
        with state.deterministic() if self.workload.twist.deterministic else nullcontext():
            return self._run(backend_name)

    def _run(self, backend_name: str) -> RankOutcome:
        kept = opened(self.context, backend_name, self.workload.layout)
        self.reached = "build"
        # Memory is filled during the build too, since that may allocate buffers of known size.
        with state.filled_memory() if self.workload.memory == "filled" else nullcontext():
            hiding = kept.session.without_optional() if self.workload.twist.without_optional else nullcontext(())
            with hiding as self.hidden:
                self.built = build_all(kept, self.workload)
            self.beside = [TrainingStep(self.context, other) for other in self.workload.twist.beside]
            for other in self.beside:
                other.built = build_all(kept, other.workload)
            return self._observed()

    def _observed(self) -> RankOutcome:
        """Follow the schedule, and compare the state of the process before and after."""
        seed, device = self.workload.twist.seed, self.context.device
        with nullcontext() if seed is None else state.seeded(seed + self.context.rank, device):
            if self.workload.twist.drawn:
                state.draw(device)
            if self.workload.twist.rehearsed:
                self._rehearse()
            before = state.snapshot(device)
            self._follow_schedule()
            return self._bring_back(before)

    def _rehearse(self) -> None:
        """Run a step with doubled parameters, discard its results, and write the workload's parameters."""
        self._reach("rehearsal")
        surfaces = [*self.built.parametrised, *self.built.routers[1:]]
        for surface in surfaces:
            parameters.write(surface, {key: 2 * value for key, value in self.workload.parameters.items()})
        self._begin(0)
        self._forward(0)
        self._backward(0)
        self._end_step()
        parameters.clear(self.built.parametrised, self.built.session.grad_attr, to_zero=False)
        self.flights, self.ended, self.phases = {}, [], []
        for surface in surfaces:
            parameters.write(surface, self.workload.parameters)

    def _once_more(self) -> None:
        """Follow the schedule from its beginning, and discard earlier results."""
        self.flights = {}
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        interleaved = self.workload.twist.interleaved
        for operation in operations(self.workload.schedule):
            if self.workload.twist.late:
                time.sleep(self.workload.twist.late[self.context.rank])
            if operation.name in BEGIN_TRAINING and not interleaved:
                for other in self.beside:
                    other._once_more()
            self._execute(operation)
            if interleaved:
                for other in self.beside:
                    self._reach(f"beside {operation}")  # keeps its collectives out of the phases of this run
                    other._execute(operation)

    def _execute(self, operation: Operation) -> None:
        """Execute one operation of the schedule."""
        name, m = operation
        if m is None:
            self._reach("finish")
            self._end_step()
            to_zero = name == "finish_to_zero"
            parameters.clear(self.built.parametrised, self.built.session.grad_attr, to_zero=to_zero)
            return
        self._reach("repetition" if name == "repeat" else name, m)
        self._begin(m)
        match name:
            case "forward":
                self._forward(m)
            case "dispatch":
                self._dispatch(m)
            case "combine":
                self._combine(m)
            case "backward":
                self._backward(m)
                self.live_groups.append(len(dist.distributed_c10d._world.pg_map))
            case "no_grad":
                self._infer(m, torch.no_grad())
            case "inference":
                self._infer(m, torch.inference_mode())
            case "unasked":
                self._infer(m, nullcontext())
            case "repeat":
                self._repeat(m)

    def _begin(self, m: int) -> None:
        """Copy a microbatch to the device, before its first operation."""
        if m not in self.flights:
            batch = self.workload.batches[m][self.context.rank]
            self.flights[m] = InFlight(Inputs(self.workload, batch, self.context.device))

    def _reach(self, phase: str, m: int | None = None) -> None:
        self.reached = phase if m is None else f"{phase}:{m}"
        self.phases.append((self.reached, self.context.calls()))

    def _forward(self, m: int) -> None:
        if not self.workload.twist.autocast:
            self._forward_as_is(m)
            return
        with torch.autocast(self.context.device.type, self.config.dtype):
            self._forward_as_is(m)

    def _forward_as_is(self, m: int) -> None:
        inputs = self.flights[m].inputs
        if self.built.routers:
            self._route(m, inputs.x)
            return
        again = self.workload.twist.recomputed == "all"
        if (layer := self.built.layer) is not None:
            self._keep_output(m, self.built.session.recompute(layer, inputs.x) if again else layer(inputs.x))
            return
        assert self.built.exchange is not None
        call, given = whole(self.built.exchange), (inputs.x, inputs.routing, self._expert(m))
        try:
            self._keep_output(m, exchange_again(self.built.session, call, *given) if again else call(*given))
        except Overflow as error:
            if (
                self.workload.run != ExchangeStep(option="receive budget")
                or self.config.receive_buffer.overflow != "refuse"
            ):
                raise
            self.flights[m].overflow = str(error)

    def _route(self, m: int, x: Tensor) -> None:
        router, again = self.built.routers[m % len(self.built.routers)], self.workload.twist.recomputed == "all"
        routed = router_again(self.built.session, router, x) if again else router(x)
        self.flights[m].output = routed.routing.weights_TK
        seen = RouterSeen(
            to_cpu(routed.routing.ids_TK),
            to_cpu(routed.routing.weights_TK),
            to_cpu(routed.logits_TE),
            to_cpu(routed.counts_E),
        )
        if self.built.undropping is not None:
            with torch.no_grad():
                kept = self.built.undropping(x.detach()).routing
            ids_TK, weights_TK = to_cpu(kept.ids_TK), to_cpu(kept.weights_TK)
            seen = replace(seen, undropped_ids_TK=ids_TK, undropped_weights_TK=weights_TK)
        self.flights[m].routed = seen

    def _dispatch(self, m: int) -> None:
        assert isinstance(self.built.exchange, SplitExchange)
        flight = self.flights[m]
        flight.delivered = self.built.exchange.dispatch(flight.inputs.x, flight.inputs.routing)

    def _combine(self, m: int) -> None:
        assert isinstance(self.built.exchange, SplitExchange)
        (delivery, handle), self.flights[m].delivered = self.flights[m].delivered, None
        self._keep_output(m, self.built.exchange.combine(self._expert(m)(delivery), handle))

    def _infer(self, m: int, mode: AbstractContextManager[object]) -> None:
        inputs = self.flights[m].inputs
        x, routing = inputs.x.detach(), inputs.routing
        if self.built.routers:
            with state.within(mode, self.state_changed):
                self._route(m, x)
            return
        if self.built.layer is not None:
            with state.within(mode, self.state_changed):
                self._keep_output(m, self.built.layer(x))
            return
        assert self.built.exchange is not None
        routing = Routing(routing.ids_TK, routing.weights_TK.detach(), routing.experts)
        with state.within(mode, self.state_changed):
            self._keep_output(m, whole(self.built.exchange)(x, routing, self._expert(m)))

    def _repeat(self, m: int) -> None:
        long = longer(self.workload.batches[m][self.context.rank])
        surface = self.built.exchange if self.built.layer is None else self.built.layer
        assert surface is not None
        take_and_forget(surface, Inputs(self.workload, long, self.context.device), self.config)
        parameters.clear(self.built.parametrised, self.built.session.grad_attr, to_zero=False)
        self.bytes_in_use.append(bytes_in_use(self.context.device))

    def _keep_output(self, m: int, output: Tensor) -> None:
        flight = self.flights[m]
        flight.output, flight.returned = output, output.detach().clone()
        if isinstance(self.built.exchange, RoutedExchange):
            flight.routed = self.built.exchange.seen
        if self.built.exchange is not None:
            flight.weights_at = claims_of(self.built.exchange).weights_at

    def _expert(self, m: int) -> ExpertFn:
        """Return the experts, which record the phase "answered": where dispatch ends and combine begins."""
        assert self.built.experts is not None
        experts = self.built.experts
        if isinstance(experts, Probe | Identity):
            experts.microbatch = m

        recomputed = self.workload.twist.recomputed == "experts"
        called: ExpertFn = experts_again(self.built.session, experts) if recomputed else experts
        if self.workload.twist.padding_gradients:
            called = self.flights[m].spoilt = PaddingGradients(experts)

        def answer(delivery: Delivery) -> Tensor:
            self.phases.append((f"answered:{m}", self.context.calls()))
            return called(delivery)

        return answer

    def _backward(self, m: int) -> None:
        self.went_back = True  # also if this rank's forward overflowed: finishing is collective
        flight = self.flights[m]
        if flight.overflow is not None:
            return
        inputs, upstream = flight.inputs, flight.inputs.upstream
        if self.built.routers:  # upstream is dense (T, E): the backend chose the slots
            ids_TK = flight.routed.ids_TK
            assert ids_TK is not None
            ids_TK = ids_TK.to(upstream.device)
            upstream = upstream.gather(1, ids_TK.clamp_min(0)) * (ids_TK >= 0)
        assert flight.output is not None
        go_back(flight.output, upstream, create_graph=self.workload.twist.create_graph)
        if self.workload.twist.create_graph:
            inputs.cut_graphs()
            parameters.cut_graphs(self.built.parametrised)
        inputs.keep_gradients()
        if not self.built.routers:
            same = {"y": flight.output_kept()}
            if isinstance(self.built.experts, Probe):
                same["rows"] = not self.built.experts.overwritten(m)
            flight.outputs_changed = tuple(name for name, is_same in same.items() if not is_same)

    def _end_step(self) -> None:
        """Finish the gradients, and record them before and after."""
        built, attribute = self.built.parametrised, self.built.session.grad_attr
        local = parameters.gradients(built, attribute)
        final, refusal = None, None
        if built and not self.went_back:
            refusal = "no backward ran, so that there is no gradient to finish"  # a trainer would not finish either
        elif built:
            mode = torch.no_grad() if self.workload.finishes_without_grad else nullcontext()
            try:
                with state.within(mode, self.state_changed):
                    self.built.session.finish_gradients(*built)
                final = parameters.gradients(built, attribute)
            except Unsupported as error:
                refusal = str(error)
        self.ended.append(Finish(local, final, refusal))
        self.went_back = False

    def _bring_back(self, before: Mapping[str, str]) -> RankOutcome:
        self._reach("finish")
        for flight in self.flights.values():
            if flight.returned is not None and flight.outputs_changed is None:  # no backward followed
                flight.outputs_changed = () if flight.output_kept() else ("y",)
        session, built = self.built.session, self.built.parametrised
        uncovered = tuple(complaint for surface in built for complaint in parameters.coverage(surface))
        self._end_step()
        self.state_changed += state.changed(before, state.snapshot(self.context.device))
        self._reach("done")
        *earlier, last = self.ended
        surfaces = [surface for surface in (self.built.exchange, *built) if surface is not None]
        claims = claims_of_all(surfaces)
        return RankOutcome(
            rank=self.context.rank,
            status="ok",
            reached=self.reached,
            microbatches=tuple(self._microbatch(m) for m in range(len(self.workload.batches))),
            local_experts=tuple(self.built.exchange.local_experts) if self.built.exchange is not None else (),
            grads_local=last.local,
            grads_final=last.final,
            earlier=tuple(earlier),
            buffered=self.built.buffered,
            grads_hooked=parameters.passed_to_hooks(built, self.built.hooked) if session.grad_attr == "grad" else None,
            finish_refusal=last.refusal,
            state_changed=tuple(dict.fromkeys(self.state_changed)),
            uncovered=uncovered,
            resolved=shown_of(surfaces, claims),
            warned=self.built.warned,
            hidden=tuple(self.hidden),
            optional=optional_of(surfaces),
            claims=claims,
            weights_at=weights_at(session, claims, self.config.weights_applied),
            partial=session.expert_output_is_partial,
            loss_convention=session.loss_convention,
            phases=tuple(self.phases),
            live_groups=tuple(self.live_groups),
            bytes_in_use=tuple(self.bytes_in_use),
        )

    def _microbatch(self, m: int) -> Microbatch:
        hidden = None if self.built.routers else self.config.hidden
        return self.flights[m].seen(self._exchanged(m), hidden)

    def _exchanged(self, m: int) -> ExchangeSeen:
        flight = self.flights[m]
        if flight.overflow is not None:
            return ExchangeSeen(overflow=flight.overflow)
        return ExchangeSeen(
            handed=self.built.experts.handed(m) if isinstance(self.built.experts, Probe | Identity) else (),
            weights_at=flight.weights_at,
            handed_back=self.built.experts.rows if isinstance(self.built.experts, Identity) else 0,
            padding_gradients=0 if flight.spoilt is None else flight.spoilt.rows,
        )


def go_back(output: Tensor, upstream: Tensor, *, create_graph: bool) -> None:
    """Run the backward of an output; the gradient is padded and reshaped if the output has a wrong shape."""
    if upstream.numel() != output.numel():  # y is wrong; its backward has collectives all the same
        upstream = F.pad(upstream.flatten(), (0, output.numel() - upstream.numel()))
    upstream = upstream.to(output.dtype).reshape(output.shape)
    with warnings.catch_warnings():  # about cycles of parameters and gradients, which are cut at once
        if create_graph:
            warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        torch.autograd.backward(output, upstream, create_graph=create_graph)


def weights_at(session: Session, claims: Claims, applied: str) -> str:
    """Return where routing weights are applied: as the config says, or as the backend claims."""
    return {"native": claims.weights_at or session.weights_at, "input": "input", "output": "combine"}[applied]
