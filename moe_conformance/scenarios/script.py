"""Run a script on one rank: build one surface of a backend, make the calls in order, return the results as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Malformed, Session, Unsupported
from moe_conformance.discovery import registered
from moe_conformance.engine import RankContext
from moe_conformance.engine.leftovers import process_groups
from moe_conformance.scenarios import parameters, state
from moe_conformance.scenarios.calling import call_through, deterministic_setting, form_of, memory_of, takes, under
from moe_conformance.scenarios.exchange_with_probe import Whole, exchange_with_probe
from moe_conformance.scenarios.outcome import Answer, RankOutcome
from moe_conformance.scenarios.padding import large_beside_pairs, spoil_unfilled
from moe_conformance.scenarios.proof import refused_by
from moe_conformance.scenarios.reported import claims_of, shown_of, without_noise
from moe_conformance.scenarios.sessions import Opened, build, meet, opened
from moe_conformance.scenarios.tensors import same_bytes, to_cpu
from moe_conformance.workloads.records import runs
from moe_conformance.workloads.records.memory import Laid, lay
from moe_conformance.workloads.records.workload import Answered, Call, Filled, Padded, Ref, Root, Workload

_OURS = ("moe_conformance.scenarios.", "moe_conformance.chapters.")
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


@dataclass(frozen=True)
class _Leaf:
    """A tensor argument: as it was drawn, and the copy that the surface was passed."""

    given: Tensor
    held: Tensor


class Script:
    """The state of one script on one rank."""

    def __init__(self, context: RankContext, workload: Workload) -> None:
        """Store the arguments; nothing runs yet."""
        self.context, self.workload = context, workload
        self.reached = "open"
        self.phases: list[tuple[str, int]] = []
        self.late: list[tuple[Any, Mapping[str, Tensor], dict[str, _Leaf]]] = []  # backwards after the last call
        self.returned: list[Any] = []  # by call; handles stay on the rank
        self.leaves: list[dict[str, _Leaf]] = []
        self.answers: list[Answer] = []
        self.laid: dict[int, tuple[Tensor, Tensor]] = {}  # of the present call, by the id of the drawn memory
        # Other scripts with their surfaces, whose calls are interleaved with those of this one.
        self.beside: list[tuple[Script, Any]] = []

    def run(self, backend_name: str) -> RankOutcome:
        """Run the script and return the record of this rank."""
        kept = opened(self.context, backend_name, self.workload.layout)
        self.backend = kept.backend
        self.reached = "build"
        # Memory is filled during the build too, since that may allocate buffers of known size.
        with state.filled_memory() if self.workload.memory == "filled" else nullcontext():
            surface = self._built(kept)
            others = [Script(self.context, other) for other in self.workload.twist.beside]
            self.beside = [(other, other._built(kept)) for other in others]
            self._follow(surface, kept.topology.group("world"))
        self._reach("done")
        claims = claims_of(surface)
        return RankOutcome(
            rank=self.context.rank,
            status="ok",
            reached=self.reached,
            answers=tuple(self._finished(number) for number in range(len(self.answers))),
            local_experts=tuple(getattr(surface, "local_experts", ())),
            resolved=shown_of([surface], claims),
            claims=claims,
            loss_convention=kept.session.loss_convention,
            phases=tuple(self.phases),
        )

    def _built(self, kept: Opened) -> Any:
        """Build the surface, and write its parameters if there are any."""
        run = self.workload.run
        assert isinstance(run, runs.Script)
        surface = _surface_of(run)(kept, self.workload, self.context)
        for call in self.workload.calls:
            method, given = getattr(surface, call.method, None), tuple(call.given[self.context.rank])
            if method is not None and not takes(method, given):
                raise Unsupported(f"{call.method} of this surface takes fewer arguments than {', '.join(given)}")
        if self.workload.parameters:
            parameters.write(surface, self.workload.parameters)
        without_noise(surface)
        return surface

    def _follow(self, surface: Any, world: dist.ProcessGroup) -> None:
        """Make the calls in order, then the late backwards."""
        for number, call in enumerate(self.workload.calls):
            for other, built in self.beside:
                self._reach(f"beside:{number}")
                other.answers.append(other._call(built, other.workload.calls[number]))
            self._reach(f"{call.method}:{number}")
            self.answers.append(self._call(surface, call))
            if call.may_raise and self.workload.layout.world > 1:
                # A rank that has raised waits here, so that a rank left behind hangs in any case, whatever comes next.
                meet(self.context, world)
        for late in self.late:
            self._backward(*late)

    def _reach(self, phase: str) -> None:
        self.reached = phase
        self.phases.append((phase, self.context.calls()))

    def _call(self, surface: Any, call: Call) -> Answer:
        leaves: dict[str, _Leaf] = {}
        self.leaves.append(leaves)
        given = call.given[self.context.rank]
        self.laid.clear()
        arguments = {name: self._argument(name, value, call, leaves) for name, value in given.items()}
        setting = deterministic_setting()
        try:
            with under(call.modes):
                try:
                    returned = call_through(call.through, getattr(surface, call.method), arguments)
                finally:
                    setting = deterministic_setting()
            if call.upstream:
                backward = (returned, call.upstream[self.context.rank], leaves)
                if call.late:
                    self.late.append(backward)
                else:
                    self._backward(*backward)
            claims = claims_of(returned)
        except Exception as error:
            if not call.may_raise or _is_ours(error):
                raise
            self.returned.append(None)
            by = refused_by(error, self.backend) if isinstance(error, Unsupported) else ""
            kind = f"{type(error).__module__}.{type(error).__qualname__}"
            return Answer(error=str(error), error_type=kind, error_by=by, deterministic=setting)
        self.returned.append(returned)
        return Answer(
            values=form_of(returned, call.through, self.context.device)
            if call.through in ("fake", "meta")
            else _by_field(returned),
            claims=claims,
            memory={} if call.through else memory_of(returned, {name: leaf.held for name, leaf in leaves.items()}),
            differentiable=isinstance(returned, Tensor) and returned.requires_grad,
            deterministic=setting,
            groups=process_groups(),
        )

    def _argument(self, name: str, value: Any, call: Call, leaves: dict[str, _Leaf]) -> Any:
        if isinstance(value, Ref):
            return _field(self.returned[value.call], value.field)
        if isinstance(value, Filled):
            rows_NCD, counts_N = (self._argument(name, part, call, leaves) for part in (value.rows_NCD, value.counts_N))
            return spoil_unfilled(rows_NCD, counts_N)
        if isinstance(value, Padded):
            rows_RD, counts_E = (self._argument(name, part, call, leaves) for part in (value.rows_RD, value.counts_E))
            return large_beside_pairs(rows_RD, counts_E, value.pairs_E)
        if isinstance(value, Answered):
            refs = (value.rows_RD, value.ids_RK, value.weights_RK)
            return _answered(*(self._argument(name, part, call, leaves) for part in refs))
        if isinstance(value, Tensor):
            held = value.to(self.context.device, copy=True).requires_grad_(name in call.differentiable)
            leaves[name] = _Leaf(value, held)
            return held
        if isinstance(value, Root):
            return self._argument(name, value.leaf, call, leaves).sqrt()
        if isinstance(value, Laid):
            return self._laid(name, value, leaves)
        if is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: getattr(value, f.name) for f in fields(value)}
            return replace(value, **{k: self._argument(f"{name}.{k}", v, call, leaves) for k, v in parts.items()})
        if isinstance(value, tuple):
            return tuple(self._argument(f"{name}.{i}", part, call, leaves) for i, part in enumerate(value))
        return value

    def _laid(self, name: str, value: Laid, leaves: dict[str, _Leaf]) -> Tensor:
        """Return one of two tensors that lie in one memory, which the arguments of a call share."""
        pair = self.laid.get(id(value.memory_M))
        if pair is None:
            memory_M = value.memory_M.to(self.context.device, copy=True)
            pair = self.laid[id(value.memory_M)] = lay(value.relation, memory_M, value.shape)
        number = ("out", "x").index(value.which)
        leaves[name] = _Leaf(lay(value.relation, value.memory_M, value.shape)[number], pair[number])
        return pair[number]

    def _backward(self, returned: Any, upstream: Mapping[str, Tensor], leaves: dict[str, _Leaf]) -> None:
        handed = {name: gradient.to(self.context.device, copy=True) for name, gradient in upstream.items()}
        for name in upstream:
            leaves[f"the upstream gradient {name}".strip()] = _Leaf(upstream[name], handed[name])
        torch.autograd.backward([_field(returned, name) for name in upstream], list(handed.values()))

    def _finished(self, number: int) -> Answer:
        """Return the answer of a call with the gradients and changes of its arguments at the end of the script."""
        leaves = self.leaves[number]
        return replace(
            self.answers[number],
            gradients={name: to_cpu(leaves[name].held.grad) for name in self.workload.calls[number].differentiable},
            changed=tuple(
                name for name, leaf in leaves.items() if not same_bytes(leaf.held.detach().cpu(), leaf.given)
            ),
        )


SurfaceOf = Callable[[Opened, Workload, RankContext], Any]  # builds the surface that a script calls


def _surface_of(run: runs.Script) -> SurfaceOf:
    """Return the function that builds the surface of a run; by default a call of the session's method of that name."""
    return _surfaces().get(run.surface, lambda kept, workload, _: build(kept.session, run.surface, workload.config))


@cache
def _surfaces() -> Mapping[str, SurfaceOf]:
    """Return the functions that build surfaces in another way, by surface: those defined here and in chapters."""
    return {"session": _session, "exchange": _exchange, **registered("scenario", "SCRIPT_SURFACES")}


def _session(kept: Opened, workload: Workload, context: RankContext) -> Session:
    return kept.session


def _exchange(kept: Opened, workload: Workload, context: RankContext) -> Whole:
    """Build the exchange with the probe expert.

    Raises:
        Unsupported: the script calls dispatch or combine, and the exchange is one call.
    """
    exchange = build(kept.session, "exchange", workload.config)
    surface = exchange_with_probe(exchange, workload.config, kept.session, kept.topology)
    for call in workload.calls:
        if not hasattr(surface, call.method):
            raise Unsupported("this exchange has no halves to call apart")
    return surface


def _answered(rows_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor | None) -> Tensor:
    if weights_RK is None:
        raise Malformed("weights were sent, and none came with the rows")
    return (rows_RD * (weights_RK * (ids_RK + 1)).sum(1, keepdim=True)).to(rows_RD.dtype)


def _is_ours(error: Exception) -> bool:
    """Return whether the suite raised an exception, in its expert or its records; then the backend refused nothing."""
    if isinstance(error, Malformed):
        return True
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and str(at.tb_frame.f_globals.get("__name__", "")).startswith(_OURS)


def _field(value: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), value) if path else value


def _by_field(returned: Any) -> dict[str, Any]:
    """Return the fields of a returned value that are data, by name; others, such as handles, are left out."""
    names = _names(returned)
    named = {"": returned} if names is None else {name: getattr(returned, name) for name in names}
    if hasattr(returned, "local_experts"):  # a surface that was built
        named = {"local_experts": tuple(returned.local_experts)}
    elif hasattr(returned, "named"):
        windows = returned.named(lambda parameter: parameter.detach())
        named = {
            "local_experts": tuple(dict.fromkeys(window.expert for window in windows if window.expert is not None))
        }
    data = {name: _data(value) for name, value in named.items()}
    return {name: value for name, value in data.items() if value is not _OPAQUE}


def _names(value: Any) -> tuple[str, ...] | None:
    """Return the fields of a dataclass or a named tuple, None for anything else."""
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in fields(value))
    return tuple(value._fields) if isinstance(value, tuple) and hasattr(value, "_fields") else None


_OPAQUE = object()


def _data(value: Any) -> Any:
    """Return a copy of a value if it is data, else `_OPAQUE`."""
    if isinstance(value, Tensor):
        return to_cpu(value)
    if isinstance(value, _PLAIN):
        return value
    if _names(value) is not None:
        return _by_field(value)
    if isinstance(value, Mapping):
        return _all_data({key: _data(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return _all_data(tuple(_data(item) for item in value))
    return _OPAQUE


def _all_data(collected: dict[Any, Any] | tuple[Any, ...]) -> Any:
    parts = collected.values() if isinstance(collected, dict) else collected
    return _OPAQUE if any(part is _OPAQUE for part in parts) else collected
