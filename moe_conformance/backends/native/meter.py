"""The load meter: how much more than its balanced share the most loaded rank of an exchange group holds.

T tokens, K slots, D hidden, R rows, n entries, L layers. An entry is one forward of one layer for one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Config, Delivery, ExpertFn, Routing, Topology, whole
from moe_conformance.surfaces import Metered, MeteredPass

NAMES = ("avg_overload_factor", "max_overload_factor", "max_cum_overload_factor")


@dataclass(frozen=True)
class Recorded:
    """An entry as one rank saw it: routed pairs that reached this rank, and the tokens that it brought."""

    layer: int | None
    pairs: int
    tokens: int


class _Observe(torch.autograd.Function):
    """The identity on dispatched rows; its backward records that the gradient of the rows is complete."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, meter: Meter, entry: int) -> Tensor:
        ctx.meter, ctx.entry = meter, entry
        return rows_RD.view_as(rows_RD)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        ctx.meter.completed(ctx.entry)
        return grad_RD, None, None


class Meter:
    """Records the passes of one rank, and reduces them when a step ends.

    Implements: LOAD-01, LOAD-02, LOAD-05, LOAD-06, LOAD-07, LOAD-08, LOAD-09, LOAD-10, LOAD-11, LOAD-17,
        LOAD-18, LOAD-24, LOAD-25, LOAD-28.
    """

    def __init__(self, topology: Topology, top_k: int, device: torch.device) -> None:
        """Begin with nothing recorded; no communication."""
        self.topology, self.top_k, self.device = topology, top_k, device
        self.entries: list[Recorded] = []
        self.events: list[tuple[int, int]] = []  # number of the entry, and +1 or -1

    def watch(self, expert: ExpertFn, layer: int | None, tokens: int) -> ExpertFn:
        """Return the expert with its input metered, for one training forward of a layer that brings some tokens."""

        def watched(delivery: Delivery) -> Tensor:
            entry = len(self.entries)
            self.entries.append(Recorded(layer, int((delivery.ids_RJ >= 0).sum()), tokens))
            if not (torch.is_grad_enabled() and delivery.rows_RD.requires_grad):
                return expert(delivery)
            self.events.append((entry, 1))
            return expert(replace(delivery, rows_RD=_Observe.apply(delivery.rows_RD, self, entry)))  # type: ignore[no-untyped-call]

        return watched

    def completed(self, entry: int) -> None:
        """Record that the backward of an entry has reached its rows."""
        self.events.append((entry, -1))

    def abandon(self) -> None:
        """Forget what was recorded since the last report."""
        self.entries, self.events = [], []

    def report(self) -> dict[str, float]:
        """Reduce what was recorded since the last report, forget it, and return the values by name; collective.

        Five collectives, whatever was recorded.

        Raises:
            RuntimeError: the ranks of an exchange group recorded different numbers of entries; on all ranks.
        """
        entries, events = self.entries, self.events
        self.abandon()
        layers = self._agree(entries)
        most_n = self._reduced([each.pairs for each in entries], "ep_etp", dist.ReduceOp.MAX)
        balanced_n = self._balanced(entries)
        factor_n = torch.where(balanced_n > 0, most_n / balanced_n.clamp_min(1e-300), 0.0)
        sums_2L, largest_L = torch.zeros(2, layers, dtype=torch.float64), torch.zeros(layers, dtype=torch.float64)
        for each, factor in zip(entries, factor_n.tolist(), strict=True):
            if each.layer is not None:
                sums_2L[:, each.layer] += torch.tensor([factor, 1.0], dtype=torch.float64)
                largest_L[each.layer] = max(float(largest_L[each.layer]), factor)
        sums_2L = self._reduced(sums_2L.flatten().tolist(), "edp", dist.ReduceOp.SUM).reshape(2, layers)
        peak = self._peak(entries, events, balanced_n)
        *largest, peak = self._reduced([*largest_L.tolist(), peak], "world", dist.ReduceOp.MAX).tolist()
        return self._named(sums_2L, largest, peak)

    def _named(self, sums_2L: Tensor, largest: Sequence[float], peak: float) -> dict[str, float]:
        total, count = sums_2L.sum(1).tolist()
        values = dict(zip(NAMES, (total / max(count, 1), max(largest, default=0.0), peak), strict=True))
        for layer, (of_layer, number) in enumerate(sums_2L.T.tolist()):
            if number:
                values[f"{NAMES[0]}_layer_{layer}"] = of_layer / number
                values[f"{NAMES[1]}_layer_{layer}"] = largest[layer]
        return {f"moe/{name}": value for name, value in values.items()}

    def _balanced(self, entries: Sequence[Recorded]) -> Tensor:
        """Return what every rank would get of each entry under balance: all etp shards of an expert get its pairs."""
        tokens_n = self._reduced([each.tokens for each in entries], "ep_etp", dist.ReduceOp.SUM)
        return self.top_k * tokens_n / self.topology.sizes["ep"]

    def _peak(self, entries: Sequence[Recorded], events: Sequence[tuple[int, int]], balanced_n: Tensor) -> float:
        """Return the peak of the pairs held over the peak of the balanced count; 0 where there is none."""
        numbered = [(entry, sign) for entry, sign in events if entries[entry].layer is not None]
        held = max(accumulate(sign * entries[entry].pairs for entry, sign in numbered), default=0)
        even = max(accumulate(sign * float(balanced_n[entry]) for entry, sign in numbered), default=0.0)
        return held / even if even > 0 else 0.0

    def _agree(self, entries: Sequence[Recorded]) -> int:
        """Return the number of layers of the world, 1 + the highest, if all ranks of each group recorded alike."""
        world, group = self.topology.sizes["world"], min(self.topology.ranks("ep_etp"))
        numbers = [float("-inf")] * (2 * world)
        numbers[2 * group : 2 * group + 2] = [len(entries), -len(entries)]
        highest = max((each.layer for each in entries if each.layer is not None), default=-1)
        *numbers, highest = self._reduced([*numbers, highest], "world", dist.ReduceOp.MAX).tolist()
        for first, (most, least) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
            if most != float("-inf") and most != -least:
                raise RuntimeError(f"the group of rank {first} recorded {-least:.0f} to {most:.0f} entries")
        return int(highest) + 1

    def _reduced(self, values: Sequence[float], group: str, how: Any) -> Tensor:
        """Return float64 values reduced over a group, on the host."""
        reduced = torch.tensor(values, dtype=torch.float64, device=self.device)
        if len(self.topology.ranks(group)) > 1:
            dist.all_reduce(reduced, op=how, group=self.topology.group(group))
        return reduced.cpu()


class MeteredExchange:
    """Steps of an exchange with a meter attached."""

    def __init__(self, config: Config, exchange: Any, meter: Meter, device: torch.device) -> None:
        """Attach the meter."""
        self.config, self.attached, self.meter, self.device = config, exchange, meter, device
        self.exchange = whole(exchange)
        self.outputs: dict[tuple[int | None, int], Tensor] = {}

    @property
    def resolved(self) -> Mapping[str, str]:
        """Where the meter is attached."""
        return {"load meter": f"hook on the rows of {type(self.attached).__name__}"}

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts."""
        held: tuple[int, ...] = self.attached.local_experts
        return held

    def step(self, passes: Sequence[MeteredPass], number: int) -> Metered:
        """Run the passes and report."""
        for each in passes:
            if each.kind == "abandon":
                self.outputs.clear()
                self.meter.abandon()
            elif each.kind == "backward":
                y_TD = self.outputs.pop((each.layer, each.microbatch))
                y_TD.backward(torch.ones_like(y_TD))
            else:
                self._forward(each)
        return Metered(self.meter.report(), number)

    def _forward(self, each: MeteredPass) -> None:
        assert each.ids_TK is not None
        assert each.padding_T is not None
        T, K = each.ids_TK.shape
        x_TD = torch.ones(T, self.config.hidden, device=self.device, requires_grad=each.kind == "forward")
        routing = Routing(each.ids_TK, torch.full((T, K), 0.5, device=self.device), self.config.experts)
        expert: ExpertFn = _double
        if each.kind != "evaluation":
            expert = self._metered(each.layer, int((~each.padding_T).sum()))
        with torch.set_grad_enabled(each.kind != "evaluation"):
            y_TD = self.exchange(x_TD, routing, expert)
        if each.kind == "forward":
            self.outputs[each.layer, each.microbatch] = y_TD

    def _metered(self, layer: int | None, tokens: int) -> ExpertFn:
        return self.meter.watch(_double, layer, tokens)


def _double(delivery: Delivery) -> Tensor:
    return (delivery.rows_RD * 2).reshape(delivery.shape)
