"""One training step of a backend on the ranks: build, follow a schedule, finish the gradients.

Three kinds of run share it: the suite's probe expert inside the backend's exchange, the backend's own experts, or its
router alone. `run` executes on every rank; `start` and `moe_step` are the driver's side.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_conformance.backends.registry import load
from moe_conformance.contract import (
    Backend,
    Delivery,
    Exchange,
    ExpertFn,
    Experts,
    Parametrised,
    Resolved,
    Router,
    Routing,
    Session,
    SplitExchange,
    Unsupported,
    whole,
)
from moe_conformance.engine import Engine, Job, RankContext, RankResult, Running
from moe_conformance.scenarios import parameters, state
from moe_conformance.scenarios.outcome import Grad, Microbatch, Outcome, RankOutcome
from moe_conformance.scenarios.probe import Probe
from moe_conformance.topology import Topology
from moe_conformance.workloads import tags
from moe_conformance.workloads.records import Asynchrony, Batch, Workload

_SESSION = "moe_conformance.session"


@dataclass(frozen=True)
class Assignment:
    """What is sent to every rank."""

    backend: str  # a name of the registry or pkg.mod:Class
    workload: Workload


@dataclass(frozen=True)
class _Kept:
    """The session that stays open in this process until another backend or layout is asked for."""

    key: tuple[Any, ...]
    backend: Backend
    session: Session
    topology: Topology


@dataclass(frozen=True)
class Step:
    """A step that was sent to the ranks."""

    backend: str
    workload: Workload
    running: Running

    def outcome(self) -> Outcome:
        """Wait for every rank and return what they brought back. Never raises for a rank's fault."""
        result = self.running.result()
        deserted = any(rank.status == "hung" for rank in result.ranks)
        ranks = tuple(_rank_outcome(rank, deserted) for rank in result.ranks)
        return Outcome(self.backend, self.workload, ranks, result.seconds, result.disagreements)


def start(engine: Engine, backend: str, workload: Workload, deadline_s: float = 60.0) -> Step:
    """Send a workload to the ranks and return while it runs there; its outcome is due before the next start."""
    job = Job(
        function="moe_conformance.scenarios.moe_step:run",
        payload=Assignment(backend, workload),
        world=workload.layout.world,
        groups=workload.layout.groups(),
        deadline_s=deadline_s,
        asynchrony=_on(engine.device, workload.asynchrony),
    )
    return Step(backend, workload, engine.start(job))


def _on(device: str, asynchrony: Asynchrony) -> Asynchrony | Literal["delayed_communication"]:
    """Poison hides buffers of the CPU; on a GPU, where data are late by themselves, they are made later."""
    return "delayed_communication" if device == "cuda" and asynchrony == "poisoned" else asynchrony


def moe_step(engine: Engine, backend: str, workload: Workload, deadline_s: float = 60.0) -> Outcome:
    """Run a workload through a backend and return what every rank brought back. Never raises for a rank's fault."""
    return start(engine, backend, workload, deadline_s).outcome()


def _rank_outcome(result: RankResult, deserted: bool) -> RankOutcome:
    """Return what a rank brought back, with what the engine says of it; `deserted`: some rank waits for ever."""
    if result.status == "ok" and (result.error is None or result.secondary or not deserted):
        assert isinstance(result.value, RankOutcome)
        return replace(result.value, ledger=result.ledger, hazards=result.hazards)
    malformed = result.error_type == "moe_conformance.contract.Malformed"
    return RankOutcome(
        rank=result.rank,
        # A rank may return while its peers wait for it in a collective: then it is the one at fault.
        status="malformed" if malformed else "hung" if result.status == "ok" else result.status,
        reached=str(result.error_attributes.get("reached", "")),
        error=result.error,
        traceback=result.traceback,
        secondary=result.secondary,
        output=result.output,
        ledger=result.ledger,
        hazards=result.hazards,
    )


def run(context: RankContext, assignment: Assignment) -> RankOutcome:
    """Do the step on this rank. An exception carries the phase that it was raised in as `reached`."""
    step = _Step(context, assignment.workload)
    try:
        return step.run(assignment.backend)
    except Unsupported as error:
        if step.reached not in ("open", "build"):
            error.reached = step.reached  # type: ignore[attr-defined]
            raise
        return RankOutcome(context.rank, "refused", step.reached, error=str(error), error_by=error.by)
    except Exception as error:
        error.reached = step.reached  # type: ignore[attr-defined]
        raise


class _Step:
    """The state of one run on one rank."""

    def __init__(self, context: RankContext, workload: Workload) -> None:
        self.context, self.workload, self.config = context, workload, workload.config
        self.reached = "open"
        self.phases: list[tuple[str, int]] = []
        self.inputs: dict[int, _Inputs] = {}
        self.delivered: dict[int, Any] = {}  # handles between the halves of a forward
        self.outputs: dict[int, Tensor] = {}
        self.returned: dict[int, Tensor] = {}  # copies of outputs, made when they were returned
        self.outputs_changed: dict[int, tuple[str, ...]] = {}
        self.routed: dict[int, dict[str, Tensor | None]] = {}

    def run(self, backend_name: str) -> RankOutcome:
        kept = _open(self.context, backend_name, self.workload)
        session = kept.session
        self.reached = "build"
        built: list[Parametrised] = []
        self.router: Router | None = None
        self.exchange: Exchange | SplitExchange | None = None
        self.experts: Probe | Experts | None = None
        if self.workload.kind == "route":
            self.router = session.router(self.config)
            built.append(self.router)
        else:
            self.exchange = session.exchange(self.config)
            if "D" in self.workload.schedule and not isinstance(self.exchange, SplitExchange):
                raise Unsupported("this exchange has no halves to interleave")
            self.experts = self._experts(session, kept.topology, built)
        for surface in built:
            parameters.write(surface, self.workload.parameters)
        with state.filled_memory() if self.workload.memory == "filled" else nullcontext():
            before = state.snapshot(self.context.device)
            self._follow_schedule()
            self.state_changed = state.changed(before, state.snapshot(self.context.device))
            return self._bring_back(session, built)

    def _experts(self, session: Session, topology: Topology, built: list[Parametrised]) -> Probe | Experts:
        assert self.exchange is not None
        if self.workload.kind == "experts":
            experts = session.experts(self.config)
            built.append(experts)
            return experts
        part = 1.0
        if session.expert_output_is_partial:
            shards = topology.ranks("etp")
            part = tags.part(shards.index(topology.rank), len(shards))
        return Probe(self.config, tuple(self.exchange.local_experts), part)

    def _follow_schedule(self) -> None:
        phases: dict[str, tuple[str, Callable[[int], None]]] = {
            "F": ("forward", self._forward),
            "D": ("dispatch", self._dispatch),
            "C": ("combine", self._combine),
            "B": ("backward", self._backward),
            "N": ("no_grad", lambda m: self._infer(m, torch.no_grad())),
            "I": ("inference", lambda m: self._infer(m, torch.inference_mode())),
        }
        for item in self.workload.schedule.split():
            phase, act = phases[item[0]]
            m = int(item[1:])
            self._reach(f"{phase}:{m}")
            if m not in self.inputs:
                batch = self.workload.batches[m][self.context.rank]
                self.inputs[m] = _Inputs(self.workload, batch, self.context.device)
            act(m)

    def _reach(self, phase: str) -> None:
        self.reached = phase
        self.phases.append((phase, self.context.calls()))

    def _forward(self, m: int) -> None:
        inputs = self.inputs[m]
        if self.router is not None:
            routed = self.router(inputs.x)
            self.outputs[m] = routed.routing.weights_TK
            self.routed[m] = {
                "routed_ids_TK": _cpu(routed.routing.ids_TK),
                "routed_weights_TK": _cpu(routed.routing.weights_TK),
                "logits_TE": _cpu(routed.logits_TE),
                "counts_E": _cpu(routed.counts_E),
            }
            return
        assert self.exchange is not None
        self._keep_output(m, whole(self.exchange)(inputs.x, inputs.routing, self._expert(m)))

    def _dispatch(self, m: int) -> None:
        assert isinstance(self.exchange, SplitExchange)
        self.delivered[m] = self.exchange.dispatch(self.inputs[m].x, self.inputs[m].routing)

    def _combine(self, m: int) -> None:
        assert isinstance(self.exchange, SplitExchange)
        delivery, handle = self.delivered.pop(m)
        self._keep_output(m, self.exchange.combine(self._expert(m)(delivery), handle))

    def _infer(self, m: int, mode: AbstractContextManager[object]) -> None:
        assert self.exchange is not None
        x, routing = self.inputs[m].x.detach(), self.inputs[m].routing
        routing = Routing(routing.ids_TK, routing.weights_TK.detach(), routing.experts)
        with mode:
            self._keep_output(m, whole(self.exchange)(x, routing, self._expert(m)))

    def _keep_output(self, m: int, output: Tensor) -> None:
        self.outputs[m], self.returned[m] = output, output.detach().clone()

    def _expert(self, m: int) -> ExpertFn:
        """Return the experts, which note where dispatch ends and combine begins."""
        assert self.experts is not None
        experts = self.experts
        if isinstance(experts, Probe):
            experts.microbatch = m

        def answer(delivery: Delivery) -> Tensor:
            self.phases.append((f"answered:{m}", self.context.calls()))
            return experts(delivery)

        return answer

    def _backward(self, m: int) -> None:
        output, upstream = self.outputs[m], self.inputs[m].upstream
        if self.router is not None:  # upstream is dense (T, E): the backend chose the slots
            ids_TK = self.routed[m]["routed_ids_TK"]
            assert ids_TK is not None
            ids_TK = ids_TK.to(upstream.device)
            upstream = upstream.gather(1, ids_TK.clamp_min(0)) * (ids_TK >= 0)
        torch.autograd.backward(output, upstream.to(output.dtype).reshape(output.shape))
        self.inputs[m].keep_gradients()
        if self.router is None:
            same = {"y": _same_bytes(self.returned[m].cpu(), output.detach().cpu())}
            if isinstance(self.experts, Probe):
                same["rows"] = not self.experts.overwritten(m)
            self.outputs_changed[m] = tuple(name for name, is_same in same.items() if not is_same)

    def _bring_back(self, session: Session, built: list[Parametrised]) -> RankOutcome:
        self._reach("finish")
        attribute = session.grad_attr
        uncovered = tuple(complaint for surface in built for complaint in parameters.coverage(surface))
        local = parameters.gradients(built, attribute)
        final, refusal = None, None
        if built:
            try:
                session.finish_gradients(*built)
                final = parameters.gradients(built, attribute)
            except Unsupported as error:
                refusal = str(error)
        self._reach("done")
        resolved = [surface.resolved for surface in (self.exchange, *built) if isinstance(surface, Resolved)]
        return RankOutcome(
            rank=self.context.rank,
            status="ok",
            reached=self.reached,
            microbatches=tuple(self._microbatch(m) for m in range(len(self.workload.batches))),
            local_experts=tuple(self.exchange.local_experts) if self.exchange is not None else (),
            grads_local=local,
            grads_final=final,
            finish_refusal=refusal,
            state_changed=self.state_changed,
            uncovered=uncovered,
            resolved={key: str(value) for each in resolved for key, value in each.items()},
            weights_at=_weights_at(session, self.config.weights_applied),
            partial=session.expert_output_is_partial,
            loss_convention=session.loss_convention,
            phases=tuple(self.phases),
        )

    def _microbatch(self, m: int) -> Microbatch:
        inputs, output = self.inputs[m], self.outputs[m]
        seen = {}
        if self.router is None:
            seen = {"y": _cpu(output).reshape(-1, self.config.hidden)}  # type: ignore[union-attr]
        return Microbatch(
            handed=self.experts.handed(m) if isinstance(self.experts, Probe) else (),
            y=seen.get("y"),
            y_shape=tuple(output.shape),
            y_dtype=output.dtype,
            dx_TD=Grad(inputs.gradients.get("x")),
            dweights_TK=Grad(inputs.gradients.get("weights")),
            inputs_changed=inputs.changed(),
            outputs_changed=self.outputs_changed.get(m, ()),
            gradients_changed=inputs.gradients_changed(),
            **self.routed.get(m, {}),
        )


class _Inputs:
    """One microbatch on this rank's device.

    `changed` names what no longer holds the bytes it was given. Gradients are copied when their backward returns, as a
    pipeline hands them on then; `gradients_changed` names what somebody wrote over later.
    """

    def __init__(self, workload: Workload, batch: Batch, device: torch.device) -> None:
        shape = batch.x_TD.shape
        if workload.lead == "two_dims":
            shape = (shape[0] // 2, 2, shape[1])  # type: ignore[assignment]
        self.given = batch
        self.x = batch.x_TD.to(device, copy=True).reshape(shape).requires_grad_()
        self.routing = Routing(
            batch.ids_TK.to(device, copy=True),
            batch.weights_TK.to(device, copy=True).requires_grad_(),
            workload.config.experts,
        )
        self.upstream = batch.upstream.to(device, copy=True)
        self.gradients: dict[str, Tensor] = {}

    def _current_gradients(self) -> dict[str, Tensor]:
        hidden = self.given.x_TD.shape[-1]
        now = {"x": _cpu(self.x.grad, flat=hidden), "weights": _cpu(self.routing.weights_TK.grad)}
        return {name: grad for name, grad in now.items() if grad is not None}

    def keep_gradients(self) -> None:
        self.gradients = self._current_gradients()

    def gradients_changed(self) -> tuple[str, ...]:
        now = self._current_gradients()
        return tuple(name for name, kept in self.gradients.items() if not _same_bytes(kept, now[name]))

    def changed(self) -> tuple[str, ...]:
        now = {
            "x": (self.x, self.given.x_TD),
            "ids": (self.routing.ids_TK, self.given.ids_TK),
            "weights": (self.routing.weights_TK, self.given.weights_TK),
            "upstream": (self.upstream, self.given.upstream),
        }
        return tuple(
            name
            for name, (held, given) in now.items()
            if not _same_bytes(held.detach().cpu().reshape(given.shape), given)
        )


def _open(context: RankContext, name: str, workload: Workload) -> _Kept:
    key = (name, workload.layout, str(context.device))
    kept: _Kept | None = context.kept.get(_SESSION)
    if kept is not None and kept.key == key:
        return kept
    if kept is not None:
        del context.kept[_SESSION]
        kept.session.close()
    backend = load(name)
    topology = Topology(workload.layout, context.rank, context.groups)
    kept = _Kept(key, backend, backend.open(topology, context.device), topology)
    context.kept[_SESSION] = kept
    return kept


def _weights_at(session: Session, applied: str) -> str:
    return {"native": session.weights_at, "input": "input", "output": "combine"}[applied]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Compare bytes, as NaN differs from itself and 0 equals -0."""
    a, b = a.contiguous(), b.contiguous()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _cpu(tensor: Tensor | None, flat: int | None = None) -> Tensor | None:
    if tensor is None:
        return None
    copied = tensor.detach().cpu().clone()
    return copied if flat is None else copied.reshape(-1, flat)
