"""Training steps of a backend on one rank: build, follow a schedule, finish the gradients; mostly of one step.

Four kinds of run share it: the suite's probe expert inside the backend's exchange, the backend's own experts, its
router alone, or a whole layer; a router with a capacity is asked without it as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import (
    Delivery,
    ExpertFn,
    Overflow,
    Routing,
    SplitExchange,
    Unsupported,
    whole,
)
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters, state
from moe_conformance.scenarios.built import build_all
from moe_conformance.scenarios.identity import Identity
from moe_conformance.scenarios.inputs import Inputs
from moe_conformance.scenarios.memory import bytes_in_use, longer, take_and_forget
from moe_conformance.scenarios.outcome import ExchangeSeen, Finish, Grad, Microbatch, RankOutcome, RouterSeen
from moe_conformance.scenarios.padding import PaddingGradients
from moe_conformance.scenarios.probe import Probe
from moe_conformance.scenarios.recomputing import exchange_again, experts_again, router_again
from moe_conformance.scenarios.reported import claims_of, claims_of_all, optional_of, shown_of
from moe_conformance.scenarios.routed_exchange import RoutedExchange
from moe_conformance.scenarios.sessions import opened
from moe_conformance.scenarios.step_parts import go_back, weights_at
from moe_conformance.scenarios.tensors import same_bytes, to_cpu
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Workload


class TrainingStep:
    """The state of one run on one rank."""

    def __init__(self, context: RankContext, workload: Workload) -> None:
        """Begin nothing yet."""
        self.context, self.workload, self.config = context, workload, workload.config
        self.reached = "open"
        self.phases: list[tuple[str, int]] = []
        self.ended: list[Finish] = []  # steps, in order
        self.went_back = False  # whether a backward ran in the step at hand
        self.live_groups: list[int] = []  # after each backward
        self.bytes_in_use: list[int | None] = []  # after each step of which nothing is kept
        self.beside: list[TrainingStep] = []  # of other exchanges, which take turns with this one
        self.inputs: dict[int, Inputs] = {}
        self.delivered: dict[int, Any] = {}  # handles between the halves of a forward
        self.outputs: dict[int, Tensor] = {}
        self.overflows: dict[int, str] = {}  # microbatches that a dispatch refused, and its words
        self.returned: dict[int, Tensor] = {}  # copies of outputs, made when they were returned
        self.weights_at: dict[int, str] = {}  # as the exchange told when they were returned
        self.outputs_changed: dict[int, tuple[str, ...]] = {}
        self.routed: dict[int, RouterSeen] = {}
        self.spoilt: dict[int, PaddingGradients] = {}
        self.state_changed: list[str] = []
        self.hidden: Sequence[str] = ()  # what the backend was built without

    def run(self, backend_name: str) -> RankOutcome:
        """Do it all and return what this rank saw."""
        with state.deterministic() if self.workload.twist.deterministic else nullcontext():
            return self._run(backend_name)

    def _run(self, backend_name: str) -> RankOutcome:
        kept = opened(self.context, backend_name, self.workload.layout)
        self.reached = "build"
        # Building is where buffers of a size that is known by then are made.
        with state.filled_memory() if self.workload.memory == "filled" else nullcontext():
            hiding = kept.session.without_optional() if self.workload.twist.without_optional else nullcontext(())
            with hiding as self.hidden:
                self.built = build_all(kept, self.workload)
            self.beside = [TrainingStep(self.context, other) for other in self.workload.twist.beside]
            for other in self.beside:
                other.built = build_all(kept, other.workload)
            return self._observed()

    def _observed(self) -> RankOutcome:
        """Follow the schedule, and see what becomes of the state of the process meanwhile."""
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
        """Take a step with twice the parameters; forget it, and write the workload's own."""
        self._reach("rehearsal")
        surfaces = [*self.built.parametrised, *self.built.routers[1:]]
        for surface in surfaces:
            parameters.write(surface, {key: 2 * value for key, value in self.workload.parameters.items()})
        self.inputs[0] = Inputs(self.workload, self.workload.batches[0][self.context.rank], self.context.device)
        self._forward(0)
        self._backward(0)
        self._end_step()
        parameters.clear(self.built.parametrised, self.built.session.grad_attr, to_zero=False)
        self.inputs, self.outputs, self.returned, self.outputs_changed, self.routed = {}, {}, {}, {}, {}
        self.ended, self.phases = [], []
        for surface in surfaces:
            parameters.write(surface, self.workload.parameters)

    def _once_more(self) -> None:
        """Follow the schedule from its beginning; what came of it before is forgotten."""
        self.inputs, self.delivered, self.outputs, self.returned = {}, {}, {}, {}
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        interleaved = self.workload.twist.interleaved
        for item in self.workload.schedule.split():
            if self.workload.twist.late:
                time.sleep(self.workload.twist.late[self.context.rank])
            for other in self.beside if item[0] in "FD" and not interleaved else ():
                other._once_more()
            self._follow(item)
            for other in self.beside if interleaved else ():
                self._reach(f"beside {item[0]}:{item[1:]}")  # its collectives are none of those of a phase of this one
                other._follow(item)

    def _follow(self, item: str) -> None:
        """Do one item of the schedule."""
        if item in ("S", "Z"):
            self._reach("finish")
            self._end_step()
            parameters.clear(self.built.parametrised, self.built.session.grad_attr, to_zero=item == "Z")
            return
        phases: dict[str, tuple[str, Callable[[int], None]]] = {
            "F": ("forward", self._forward),
            "D": ("dispatch", self._dispatch),
            "C": ("combine", self._combine),
            "B": ("backward", self._backward),
            "N": ("no_grad", lambda m: self._infer(m, torch.no_grad())),
            "I": ("inference", lambda m: self._infer(m, torch.inference_mode())),
            "U": ("unasked", lambda m: self._infer(m, nullcontext())),
            "R": ("repetition", self._repeat),
        }
        phase, act = phases[item[0]]
        m = int(item[1:])
        self._reach(f"{phase}:{m}")
        if m not in self.inputs:
            batch = self.workload.batches[m][self.context.rank]
            self.inputs[m] = Inputs(self.workload, batch, self.context.device)
        act(m)
        if item[0] == "B":
            self.live_groups.append(len(dist.distributed_c10d._world.pg_map))

    def _reach(self, phase: str) -> None:
        self.reached = phase
        self.phases.append((phase, self.context.calls()))

    def _forward(self, m: int) -> None:
        if not self.workload.twist.autocast:
            self._forward_as_is(m)
            return
        with torch.autocast(self.context.device.type, self.config.dtype):
            self._forward_as_is(m)

    def _forward_as_is(self, m: int) -> None:
        inputs = self.inputs[m]
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
            self.overflows[m] = str(error)

    def _route(self, m: int, x: Tensor) -> None:
        router, again = self.built.routers[m % len(self.built.routers)], self.workload.twist.recomputed == "all"
        routed = router_again(self.built.session, router, x) if again else router(x)
        self.outputs[m] = routed.routing.weights_TK
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
        self.routed[m] = seen

    def _dispatch(self, m: int) -> None:
        assert isinstance(self.built.exchange, SplitExchange)
        self.delivered[m] = self.built.exchange.dispatch(self.inputs[m].x, self.inputs[m].routing)

    def _combine(self, m: int) -> None:
        assert isinstance(self.built.exchange, SplitExchange)
        delivery, handle = self.delivered.pop(m)
        self._keep_output(m, self.built.exchange.combine(self._expert(m)(delivery), handle))

    def _infer(self, m: int, mode: AbstractContextManager[object]) -> None:
        x, routing = self.inputs[m].x.detach(), self.inputs[m].routing
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
        self.outputs[m], self.returned[m] = output, output.detach().clone()
        if isinstance(self.built.exchange, RoutedExchange):
            self.routed[m] = self.built.exchange.seen
        if self.built.exchange is not None and (place := claims_of(self.built.exchange).weights_at) is not None:
            self.weights_at[m] = place

    def _expert(self, m: int) -> ExpertFn:
        """Return the experts, which note where dispatch ends and combine begins."""
        assert self.built.experts is not None
        experts = self.built.experts
        if isinstance(experts, Probe | Identity):
            experts.microbatch = m

        recomputed = self.workload.twist.recomputed == "experts"
        asked: ExpertFn = experts_again(self.built.session, experts) if recomputed else experts
        if self.workload.twist.padding_gradients:
            asked = self.spoilt[m] = PaddingGradients(experts)

        def answer(delivery: Delivery) -> Tensor:
            self.phases.append((f"answered:{m}", self.context.calls()))
            return asked(delivery)

        return answer

    def _backward(self, m: int) -> None:
        self.went_back = True  # here also if this rank's forward overflowed: finishing is collective
        if m in self.overflows:
            return
        output, upstream = self.outputs[m], self.inputs[m].upstream
        if self.built.routers:  # upstream is dense (T, E): the backend chose the slots
            ids_TK = self.routed[m].ids_TK
            assert ids_TK is not None
            ids_TK = ids_TK.to(upstream.device)
            upstream = upstream.gather(1, ids_TK.clamp_min(0)) * (ids_TK >= 0)
        go_back(output, upstream, create_graph=self.workload.twist.create_graph)
        if self.workload.twist.create_graph:
            self.inputs[m].cut_graphs()
            parameters.cut_graphs(self.built.parametrised)
        self.inputs[m].keep_gradients()
        if not self.built.routers:
            same = {"y": self._output_kept(m)}
            if isinstance(self.built.experts, Probe):
                same["rows"] = not self.built.experts.overwritten(m)
            self.outputs_changed[m] = tuple(name for name, is_same in same.items() if not is_same)

    def _output_kept(self, m: int) -> bool:
        return same_bytes(self.returned[m].cpu(), self.outputs[m].detach().cpu())

    def _end_step(self) -> None:
        """Finish the gradients, and keep those before and those after."""
        built, attribute = self.built.parametrised, self.built.session.grad_attr
        local = parameters.gradients(built, attribute)
        final, refusal = None, None
        if built and not self.went_back:
            refusal = "no backward ran, so that there is no gradient to finish"  # a trainer would not ask for it
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
        for m in self.returned.keys() - self.outputs_changed.keys():  # no backward followed: they stay to the end
            self.outputs_changed[m] = () if self._output_kept(m) else ("y",)
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
        if m in self.overflows:
            return Microbatch(None, (), None, Grad(None), Grad(None), ExchangeSeen(overflow=self.overflows[m]))
        inputs, output = self.inputs[m], self.outputs[m]
        seen = {}
        if not self.built.routers:
            # As it was returned: what later microbatches may do to its memory is judged for itself.
            seen = {"y": to_cpu(self.returned[m]).reshape(-1, self.config.hidden)}  # type: ignore[union-attr]
        return Microbatch(
            y=seen.get("y"),
            y_shape=tuple(output.shape),
            y_dtype=output.dtype,
            dx_TD=Grad(inputs.gradients.get("x")),
            dweights_TK=Grad(inputs.gradients.get("weights")),
            exchange=self._exchanged(m),
            router=self.routed.get(m, RouterSeen()),
            inputs_changed=inputs.changed(),
            outputs_changed=self.outputs_changed.get(m, ()),
            gradients_changed=inputs.gradients_changed(),
        )

    def _exchanged(self, m: int) -> ExchangeSeen:
        return ExchangeSeen(
            handed=self.built.experts.handed(m) if isinstance(self.built.experts, Probe | Identity) else (),
            weights_at=self.weights_at.get(m),
            handed_back=self.built.experts.rows if isinstance(self.built.experts, Identity) else 0,
            padding_gradients=self.spoilt[m].rows if m in self.spoilt else 0,
        )
