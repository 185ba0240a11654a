"""Load meters that use what the requirements leave free: they must pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.meter import Meter, MeteredExchange, Recorded
from moe_conformance.contract import Delivery, ExpertFn, Metered, MeteredPass


class _Single(Meter):
    def _reduced(self, values: Sequence[float], group: str, how: Any) -> Tensor:
        return super()._reduced(values, group, how).float().double()

    def _factors(self, pairs_nC: Tensor, balanced_n: Tensor) -> Tensor:
        return (pairs_nC.amax(1).float() / (balanced_n.float() + 1e-8)).double()


class Single(Native):
    """Values are in float32, with a guard against a division by zero in every denominator."""

    session_class = NativeSession.building(_Single)


class _LeavesOutEmpty(Meter):
    def _summed(self, entries: Sequence[Recorded]) -> tuple[Tensor, Tensor]:
        pairs_nC, tokens_n = super()._summed(entries)
        assert isinstance(entries, list)
        entries[:] = [
            each if tokens else replace(each, layer=None)
            for each, tokens in zip(entries, tokens_n.tolist(), strict=True)
        ]
        return pairs_nC, tokens_n


class LeavesOutEmpty(Native):
    """Entries without tokens are in no value."""

    session_class = NativeSession.building(_LeavesOutEmpty)


class _RecordsRepeated(Meter):
    def watch(self, expert: ExpertFn, forward: MeteredPass) -> ExpertFn:
        watched = super().watch(expert, forward)
        arrived: list[int] = []

        def recording(delivery: Delivery) -> Tensor:
            if forward.recomputed and arrived:
                self.events.append((arrived[0], 1))
            arrived.append(len(self.entries))
            return watched(delivery)

        return recording

    def arrived(self, forward: MeteredPass, flows: bool) -> int:
        return super().arrived(forward, flows and not forward.recomputed)


class RecordsRepeated(Native):
    """A forward that is recomputed adds to the timeline when it is repeated."""

    session_class = NativeSession.building(_RecordsRepeated)


class _RefusesUneven(Meter):
    def _agree(self, entries: Sequence[Recorded]) -> int:
        layers = super()._agree(entries)
        most, least = self._reduced([len(entries), -len(entries)], "edp", dist.ReduceOp.MAX).tolist()
        if self._reduced([float(most != -least)], "world", dist.ReduceOp.MAX).item():
            raise RuntimeError("the slices of a stage recorded different numbers of entries")
        return layers


class RefusesUneven(Native):
    """A report of uneven slices raises on all ranks."""

    session_class = NativeSession.building(_RefusesUneven)


class _WithoutCounters(MeteredExchange):
    def report(self, number: int) -> Metered:
        return replace(super().report(number), counts_E=None, trace=None)


class WithoutCounters(Native):
    """A meter of factors alone: it has no counter of experts and no trace."""

    session_class = NativeSession.building(_WithoutCounters)
