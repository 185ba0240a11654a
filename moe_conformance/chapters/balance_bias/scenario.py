"""Run training steps of routers whose balance bias is updated; every call of a script is one step or action.

E experts; a tuple has an entry for every layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import BalancingRouters, Routed, Session, Trained, Unsupported
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.script_surface import ScriptSurface
from moe_conformance.scenarios.sessions import Opened, build
from moe_conformance.scenarios.training import backward, in_mode
from moe_conformance.workloads.records.training import RouterBatch
from moe_conformance.workloads.records.workload import Workload

_RATE = 0.5  # of the optimizer, whose weight decay is as large


@dataclass(frozen=True)
class Biases:
    """Copies of the biases at one time, (E,) by layer, in every way in which they can be read."""

    now: tuple[Tensor, ...]  # through new windows
    held: tuple[Tensor, ...]  # through the windows that were read before the first call
    saved: tuple[
        Tensor | None, ...
    ]  # in the state dictionary from before the first call, or in a new one if it holds copies
    loads: tuple[Tensor, ...] | None  # the load counters


@dataclass(frozen=True)
class Forward:
    """The results of one forward, and the biases after it and its backward."""

    ids: tuple[Tensor, ...]  # (T, K)
    logits: tuple[Tensor | None, ...]  # (T, E)
    after: Biases


@dataclass(frozen=True)
class StepSeen:
    """The record of one step: its forwards in order, and the biases before it and after each of its updates."""

    before: Biases
    forwards: tuple[Forward, ...]
    gradients: tuple[Tensor | None, ...]  # of the biases, before the first update
    updates: tuple[Biases, ...]


@dataclass(frozen=True)
class Optimised:
    """The biases before and after an optimizer step, and how many elements of the routers it changed."""

    before: Biases
    after: Biases
    changed: int


@dataclass(frozen=True)
class _Entry:
    """The place of a layer's bias in a state dictionary: the key, and the row of E elements."""

    key: str
    row: int
    shared: bool  # it is the bias itself and no copy


class BalancedRouters(ScriptSurface[BalancingRouters]):
    """The surface of scripts about the balance bias: the routers of a model, and the trainer of their steps."""

    def __init__(self, surface: BalancingRouters, session: Session, given: Sequence[Mapping[str, Any]]) -> None:
        """Keep the routers and the session.

        Raises:
            Unsupported: the routers take no padding mask, and the calls have padding.
        """
        padded = any(batch.padding_T is not None for call in given for batch in call.get("batches", ()))
        if padded and not surface.takes_mask:
            raise Unsupported("these routers take no padding mask")
        super().__init__(surface)
        self.session = session
        self.windows: tuple[Tensor, ...] | None = None
        self.kept: Mapping[str, Any] = {}

    def step(self, batches: tuple[RouterBatch, ...], updates: int) -> StepSeen:
        """Run the forwards and backwards of one step, then that many updates."""
        before = self._biases()
        parameters.clear([self.surface], self.session.grad_attr, to_zero=False)
        forwards = tuple(map(self._forward, batches))
        found = parameters.gradients([self.surface], self.session.grad_attr)
        gradients = tuple(found["balance_bias", layer].value for layer in range(len(before.now)))
        return StepSeen(before, forwards, gradients, tuple(self._update() for _ in range(updates)))

    def save(self) -> Biases:
        """Save a copy of the state dictionary, and return the biases."""
        state = self.surface.state_dict()
        self.kept = {
            key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()
        }
        return self._biases()

    def load(self) -> Biases:
        """Load the saved state dictionary, and return the biases."""
        self.surface.load_state_dict(self.kept)
        return self._biases()

    def optimise(self) -> Optimised:
        """Run an optimizer step over all parameters, with gradients of ones."""
        before, routers = self._biases(), [router.clone() for router in self._read("router")]
        optimised = list(self.surface.parameters())
        for parameter in optimised:
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        if optimised:
            torch.optim.SGD(optimised, lr=_RATE, weight_decay=_RATE).step()
        pairs = zip(routers, self._read("router"), strict=True)
        return Optimised(before, self._biases(), sum(int((old != new).sum()) for old, new in pairs))

    def _forward(self, batch: RouterBatch) -> Forward:
        x = tuple(x_SBD.detach().clone().requires_grad_(batch.mode == "training") for x_SBD in batch.x)
        with in_mode(self.surface, batch.mode):
            returned: tuple[Routed, ...] = self.surface(x, batch.padding_T)
        backward(batch, Trained(returned), 0.0)
        return Forward(
            tuple(routed.routing.ids_TK for routed in returned),
            tuple(None if routed.logits_TE is None else routed.logits_TE.detach() for routed in returned),
            self._biases(),
        )

    def _update(self) -> Biases:
        self.surface.update()
        return self._biases()

    def _read(self, name: str) -> tuple[Tensor, ...]:
        """Return the views of the windows of a name, in the order of layers."""
        windows = self.surface.named(lambda parameter: parameter.detach())
        found = {int(window.expert or 0): window.view for window in windows if window.name == name}
        return tuple(found[layer] for layer in sorted(found))

    def _biases(self) -> Biases:
        """Read the biases in every way; the first call also stores the windows and the state dictionary."""
        now = self._read("balance_bias")
        if self.windows is None:
            self.windows, self.state = now, self.surface.state_dict()
            self.entries = [_entry(self.state, window) for window in now]
        loads = self.surface.loads()
        return Biases(
            now=tuple(tensor.clone() for tensor in now),
            held=tuple(tensor.clone() for tensor in self.windows),
            saved=tuple(map(self._saved, self.entries)),
            loads=None if loads is None else tuple(tensor.detach().clone() for tensor in loads),
        )

    def _saved(self, entry: _Entry | None) -> Tensor | None:
        if entry is None:
            return None
        state = self.state if entry.shared else self.surface.state_dict()
        rows = _rows(state.get(entry.key), self.windows[0])  # type: ignore[index]
        return rows[entry.row].detach().clone() if entry.row < len(rows) else None


def _entry(state: Mapping[str, Any], bias_E: Tensor) -> _Entry | None:
    """Return the place of a bias in a state dictionary, found by its memory, else by its values."""
    copy = None
    for key, value in state.items():
        for number, row_E in enumerate(_rows(value, bias_E)):
            if row_E.data_ptr() == bias_E.data_ptr():
                return _Entry(key, number, shared=True)
            if copy is None and torch.equal(row_E.to(bias_E), bias_E):
                copy = _Entry(key, number, shared=False)
    return copy


def _rows(value: Any, bias_E: Tensor) -> list[Tensor]:
    """Return the rows of E elements of an entry, which may be biases; none if it does not consist of such rows."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() % len(bias_E):
        return []
    return list(value.detach().reshape(-1, len(bias_E)))


def balanced_routers(kept: Opened, workload: Workload, context: RankContext) -> BalancedRouters:
    """Build the routers for a script of training steps and other actions of a trainer."""
    routers = build(kept.session, "balancing_routers", workload.config)
    return BalancedRouters(routers, kept.session, [call.given[context.rank] for call in workload.calls])


SCRIPT_SURFACES = {"balancing_routers": balanced_routers}
