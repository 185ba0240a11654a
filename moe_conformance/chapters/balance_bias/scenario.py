"""Steps of the routers of a model whose balance bias is updated, on one rank: what each call of a script does.

E experts; a tuple has an entry for every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import BalancingRouters, Claims, Named, Read, Routed, Session, Trained, Unsupported
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.reported import claims_of
from moe_conformance.scenarios.sessions import Opened, build
from moe_conformance.scenarios.training import backward, in_mode
from moe_conformance.workloads.records.training import RouterBatch
from moe_conformance.workloads.records.workload import Workload

_RATE = 0.5  # of the optimizer, whose weight decay is as large


@dataclass(frozen=True)
class Biases:
    """The biases at one moment, (E,) by layer, in every way in which they can be read; copies."""

    now: tuple[Tensor, ...]  # through windows that are read anew
    held: tuple[Tensor, ...]  # through windows that were read before the first call
    saved: tuple[Tensor | None, ...]  # in the state dictionary of before the first call, or anew if that holds copies
    loads: tuple[Tensor, ...] | None  # the counters


@dataclass(frozen=True)
class Forward:
    """What one forward returned, and the biases after it and its backward."""

    ids: tuple[Tensor, ...]  # (T, K)
    logits: tuple[Tensor | None, ...]  # (T, E)
    after: Biases


@dataclass(frozen=True)
class StepSeen:
    """One step: its forwards in order, and the biases before it and after each of its updates."""

    before: Biases
    forwards: tuple[Forward, ...]
    gradients: tuple[Tensor | None, ...]  # of the biases, before the first update
    updates: tuple[Biases, ...]


@dataclass(frozen=True)
class Optimised:
    """The biases around a step of an optimizer, and how many elements of the routers it changed."""

    before: Biases
    after: Biases
    changed: int


@dataclass(frozen=True)
class _Entry:
    """Where a state dictionary holds the bias of a layer: under which key, and in which row of E elements."""

    key: str
    row: int
    shared: bool  # it is the bias itself and no copy


class BalancedRouters:
    """The routers of a model and their trainer."""

    def __init__(self, surface: BalancingRouters, session: Session, given: Sequence[Mapping[str, Any]]) -> None:
        """Keep what was built.

        Raises:
            Unsupported: it takes no mask, and what the calls are given has padding.
        """
        padded = any(each.padding_T is not None for call in given for each in call.get("batches", ()))
        if padded and not surface.takes_mask:
            raise Unsupported("these routers take no padding mask")
        self.surface, self.session = surface, session
        self.windows: tuple[Tensor, ...] | None = None
        self.kept: Mapping[str, Any] = {}

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the routers report of themselves."""
        return self.surface.resolved

    @property
    def claims(self) -> Claims:
        """What the routers claim."""
        return claims_of(self.surface)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows of the routers."""
        return self.surface.named(read)

    def step(self, batches: tuple[RouterBatch, ...], updates: int) -> StepSeen:
        """Make the forwards and backwards of one step, then as many updates."""
        before = self._biases()
        parameters.clear([self.surface], self.session.grad_attr, to_zero=False)
        forwards = tuple(map(self._forward, batches))
        found = parameters.gradients([self.surface], self.session.grad_attr)
        gradients = tuple(found["balance_bias", layer].value for layer in range(len(before.now)))
        return StepSeen(before, forwards, gradients, tuple(self._update() for _ in range(updates)))

    def save(self) -> Biases:
        """Save a copy of the state."""
        state = self.surface.state_dict()
        self.kept = {key: each.detach().clone() if isinstance(each, Tensor) else each for key, each in state.items()}
        return self._biases()

    def load(self) -> Biases:
        """Load what was saved."""
        self.surface.load_state_dict(self.kept)
        return self._biases()

    def optimise(self) -> Optimised:
        """Make a step of an optimizer over all parameters, each of which has a gradient of ones."""
        before, routers = self._biases(), [each.clone() for each in self._read("router")]
        optimised = list(self.surface.parameters())
        for parameter in optimised:
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        if optimised:
            torch.optim.SGD(optimised, lr=_RATE, weight_decay=_RATE).step()
        pairs = zip(routers, self._read("router"), strict=True)
        return Optimised(before, self._biases(), sum(int((old != new).sum()) for old, new in pairs))

    def _forward(self, batch: RouterBatch) -> Forward:
        x = tuple(each.detach().clone().requires_grad_(batch.mode == "training") for each in batch.x)
        with in_mode(self.surface, batch.mode):
            returned: tuple[Routed, ...] = self.surface(x, batch.padding_T)
        backward(batch, Trained(returned), 0.0)
        return Forward(
            tuple(each.routing.ids_TK for each in returned),
            tuple(None if each.logits_TE is None else each.logits_TE.detach() for each in returned),
            self._biases(),
        )

    def _update(self) -> Biases:
        self.surface.update()
        return self._biases()

    def _read(self, name: str) -> tuple[Tensor, ...]:
        """Return the windows of a name in the order of layers."""
        windows = self.surface.named(lambda each: each.detach())
        found = {int(each.expert or 0): each.view for each in windows if each.name == name}
        return tuple(found[layer] for layer in sorted(found))

    def _biases(self) -> Biases:
        """Read all there is; before the first call what is held is read as well."""
        now = self._read("balance_bias")
        if self.windows is None:
            self.windows, self.state = now, self.surface.state_dict()
            self.entries = [_entry(self.state, window) for window in now]
        loads = self.surface.loads()
        return Biases(
            now=tuple(each.clone() for each in now),
            held=tuple(each.clone() for each in self.windows),
            saved=tuple(map(self._saved, self.entries)),
            loads=None if loads is None else tuple(each.detach().clone() for each in loads),
        )

    def _saved(self, entry: _Entry | None) -> Tensor | None:
        if entry is None:
            return None
        state = self.state if entry.shared else self.surface.state_dict()
        rows = _rows(state.get(entry.key), self.windows[0])  # type: ignore[index]
        return rows[entry.row].detach().clone() if entry.row < len(rows) else None


def _entry(state: Mapping[str, Any], bias_E: Tensor) -> _Entry | None:
    """Find the bias in a state dictionary: by its memory, else by its values."""
    copy = None
    for key, each in state.items():
        for number, row_E in enumerate(_rows(each, bias_E)):
            if row_E.data_ptr() == bias_E.data_ptr():
                return _Entry(key, number, shared=True)
            if copy is None and torch.equal(row_E.to(bias_E), bias_E):
                copy = _Entry(key, number, shared=False)
    return copy


def _rows(value: Any, bias_E: Tensor) -> list[Tensor]:
    """Return what may be biases in an entry: its rows of as many elements."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() % len(bias_E):
        return []
    return list(value.detach().reshape(-1, len(bias_E)))


def balanced_routers(kept: Opened, workload: Workload, context: RankContext) -> BalancedRouters:
    """Build the routers, whose calls are mostly steps of a trainer."""
    routers = build(kept.session, "balancing_routers", workload.config)
    return BalancedRouters(routers, kept.session, [call.given[context.rank] for call in workload.calls])


SCRIPT_SURFACES = {"balancing_routers": balanced_routers}
