"""The load meter: how much more than its balanced share the most loaded rank of an exchange group holds.

T tokens, K slots, E experts, D hidden, R rows, n entries, L layers, C ranks of ep. An entry is one forward of one layer
for one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.offered import offers
from moe_conformance.contract import (
    Config,
    Delivery,
    ExpertFn,
    Metered,
    MeteredPass,
    MeteredResults,
    Routing,
    Topology,
    whole,
)

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession

NAMES = ("avg_overload_factor", "max_overload_factor", "max_cum_overload_factor")


@dataclass(frozen=True)
class Recorded:
    """An entry as one rank brought it: the routed pairs of every expert, and the tokens."""

    layer: int | None
    counts_E: Tensor
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
        return ctx.meter.gradient(grad_RD), None, None


class _Recompute(torch.autograd.Function):
    """Activation recomputation: the forward keeps its inputs alone, and is repeated before its backward.

    `torch.utils.checkpoint` does the same, and imports a compiler when it is called, which takes seconds.
    """

    @staticmethod
    def forward(ctx: Any, through: Callable[..., Tensor], x: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.through = through
        ctx.save_for_backward(x, weights_TK)
        return through(x, weights_TK)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [leaf.detach().requires_grad_() for leaf in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.through(*leaves)
        return None, *torch.autograd.grad(y, leaves, upstream)


class Meter:
    """Records the passes of one rank, and reduces them when a step ends.

    Pairs are counted where they come from, by expert: what a dispatcher sends, pads or gathers is not looked at.

    Implements: LOAD-01, LOAD-02, LOAD-05, LOAD-06, LOAD-07, LOAD-08, LOAD-09, LOAD-10, LOAD-11, LOAD-17,
        LOAD-18, LOAD-24, LOAD-25, LOAD-28.
    """

    def __init__(self, topology: Topology, config: Config, device: torch.device) -> None:
        """Begin with nothing recorded; no communication."""
        self.topology, self.config, self.device = topology, config, device
        # Of ranks that hold copies of the same tokens the first one brings them.
        self.brings = not config.token_copies or topology.rank == min(topology.ranks("tp"))
        self.abandon()

    def watch(self, expert: ExpertFn, forward: MeteredPass) -> ExpertFn:
        """Return the expert with its input metered, for one training forward.

        It is recorded as its rows arrive; where the forward is repeated, for its backward, that is the same entry.

        Implements: LOAD-15, LOAD-16, LOAD-20.
        """
        recorded: list[int] = []  # the entry, once there is one

        def watched(delivery: Delivery) -> Tensor:
            flows = torch.is_grad_enabled() and delivery.rows_RD.requires_grad
            if not recorded:
                recorded.append(self.arrived(forward, flows or forward.recomputed))
            if not flows:
                return expert(delivery)
            return expert(replace(delivery, rows_RD=_Observe.apply(delivery.rows_RD, self, recorded[0])))  # type: ignore[no-untyped-call]

        return watched

    def arrived(self, forward: MeteredPass, flows: bool) -> int:
        """Record a forward, which a backward follows if it `flows`, and return the number of its entry.

        Implements: LOAD-19, LOAD-30.
        """
        assert forward.ids_TK is not None
        entry = len(self.entries)
        self.entries.append(Recorded(forward.layer, self._counts(forward.ids_TK), self._tokens(forward)))
        if flows:
            self.events.append((entry, 1))
        if forward.layer is not None:
            self.trace[forward.layer, forward.microbatch] = forward.ids_TK.clone()
        return entry

    def completed(self, entry: int) -> None:
        """Record that the backward of an entry has reached its rows."""
        self.events.append((entry, -1))

    def gradient(self, grad_RD: Tensor) -> Tensor:
        """Return the gradient of metered rows: as it came.

        Implements: LOAD-21.
        """
        return grad_RD

    def abandon(self) -> None:
        """Forget what was recorded since the last report."""
        self.entries: list[Recorded] = []
        self.events: list[tuple[int, int]] = []  # number of the entry, and +1 or -1
        self.trace: dict[tuple[int, int], Tensor] = {}

    def report(self) -> dict[str, float]:
        """Reduce what was recorded since the last report, forget it, and return the values by name; collective.

        Four collectives, whatever was recorded, also on a rank that has recorded nothing.

        Raises:
            RuntimeError: the ranks of an exchange group recorded different numbers of entries; on all ranks.

        Implements: LOAD-12, LOAD-13, LOAD-23, LOAD-26, LOAD-27.
        """
        entries, events = self.entries, self.events
        self.abandon()
        layers = self._agree(entries)
        pairs_nC, tokens_n = self._summed(entries)
        balanced_n = self._balanced(tokens_n)
        factor_n = self._factors(pairs_nC, balanced_n)
        totals, numbers, largest = [0.0] * layers, [0] * layers, [0.0] * layers
        for entry, factor in zip(entries, factor_n.tolist(), strict=True):
            if entry.layer is not None:
                totals[entry.layer] += factor
                numbers[entry.layer] += 1
                largest[entry.layer] = max(largest[entry.layer], factor)
        sums_2L = self._reduced([*totals, *numbers], "edp", dist.ReduceOp.SUM).reshape(2, layers)
        own_n = pairs_nC[:, self.topology.ranks("ep").index(self.topology.rank)]
        peak = self._peak([entry.layer for entry in entries], events, own_n.tolist(), balanced_n.tolist())
        *largest, peak = self._reduced([*largest, peak], "world", dist.ReduceOp.MAX).tolist()
        return self._named(sums_2L, largest, peak)

    def counted(self) -> Tensor:
        """Return the routed pairs of every expert since the last report, (E,), of this rank's tokens.

        Implements: LOAD-29.
        """
        none_E = torch.zeros(self.config.experts, dtype=torch.int64, device=self.device)
        return sum((entry.counts_E for entry in self.entries), none_E)

    def _counts(self, ids_TK: Tensor) -> Tensor:
        """Return the pairs of every expert, (E,): padding and dropped pairs have empty slots.

        Implements: LOAD-04.
        """
        ids_P = ids_TK.flatten() if self.brings else ids_TK.new_empty(0)
        return torch.bincount(ids_P + 1, minlength=self.config.experts + 1)[1:]  # an empty slot is -1

    def _tokens(self, forward: MeteredPass) -> int:
        """Return how many tokens this rank brings, in whatever shape.

        Implements: LOAD-03.
        """
        assert forward.padding_T is not None
        return int((~forward.padding_T).sum()) if self.brings else 0

    def _named(self, sums_2L: Tensor, largest: Sequence[float], peak: float) -> dict[str, float]:
        total, count = sums_2L.sum(1).tolist()
        values = dict(zip(NAMES, (total / max(count, 1), max(largest, default=0.0), peak), strict=True))
        for layer, (of_layer, number) in enumerate(sums_2L.T.tolist()):
            if number:
                values[f"{NAMES[0]}_layer_{layer}"] = of_layer / number
                values[f"{NAMES[1]}_layer_{layer}"] = largest[layer]
        return {f"moe/{name}": value for name, value in values.items()}

    def _summed(self, entries: Sequence[Recorded]) -> tuple[Tensor, Tensor]:
        """Return how many pairs of each entry every rank of ep gets, (n, C), and of how many tokens, (n,)."""
        n, C, E = len(entries), self.topology.sizes["ep"], self.config.experts
        counts_nE = torch.stack([entry.counts_E for entry in entries]) if entries else torch.zeros(0, E)
        tokens_n1 = counts_nE.new_tensor([entry.tokens for entry in entries]).unsqueeze(1)
        brought_nM = torch.cat([counts_nE.reshape(n, C, E // C).sum(2), tokens_n1], 1)
        sums_nM = self._reduced(brought_nM.flatten().tolist(), "ep_etp", dist.ReduceOp.SUM).reshape(n, C + 1)
        return sums_nM[:, :C], sums_nM[:, C]

    def _factors(self, pairs_nC: Tensor, balanced_n: Tensor) -> Tensor:
        """Return the factor of every entry, (n,): 0 of one without tokens.

        Implements: LOAD-14.
        """
        return torch.where(balanced_n > 0, pairs_nC.amax(1) / balanced_n.clamp_min(1e-300), 0.0)

    def _balanced(self, tokens_n: Tensor) -> Tensor:
        """Return what every rank would get of each entry under balance: all etp shards of an expert get its pairs."""
        return self.config.top_k * tokens_n / self.topology.sizes["ep"]

    def _peak(
        self,
        layers: Sequence[int | None],
        events: Sequence[tuple[int, int]],
        pairs_n: Sequence[float],
        balanced_n: Sequence[float],
    ) -> float:
        """Return the peak of the pairs held over the peak of the balanced count; 0 where there is none."""
        numbered = [(entry, sign) for entry, sign in events if layers[entry] is not None]
        held = max(accumulate(sign * pairs_n[entry] for entry, sign in numbered), default=0.0)
        even = max(accumulate(sign * balanced_n[entry] for entry, sign in numbered), default=0.0)
        return held / even if even > 0 else 0.0

    def _agree(self, entries: Sequence[Recorded]) -> int:
        """Return the number of layers of the world, 1 + the highest, if all ranks of each group recorded alike."""
        world, group = self.topology.sizes["world"], min(self.topology.ranks("ep_etp"))
        numbers = [float("-inf")] * (2 * world)
        numbers[2 * group : 2 * group + 2] = [len(entries), -len(entries)]
        highest = max((entry.layer for entry in entries if entry.layer is not None), default=-1)
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

    def __init__(self, config: Config, exchange: Any, meter: Meter) -> None:
        """Attach the meter; the experts double their rows."""
        self.config, self.attached, self.meter = config, exchange, meter
        self.expert: ExpertFn = _double
        self.exchange = whole(exchange)
        self.on = True
        # Of every forward until its backward: y, what asks for gradients, and the gradient of y.
        self.running: dict[tuple[int | None, int], tuple[Tensor, tuple[Tensor, ...], Tensor]] = {}

    @property
    def resolved(self) -> Mapping[str, str]:
        """Where the meter is attached."""
        return {"load meter": f"hook on the rows of {type(self.attached).__name__}"}

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts."""
        held: tuple[int, ...] = self.attached.local_experts
        return held

    def switch(self, on: bool) -> None:
        """Switch the meter."""
        self.on = on

    def report(self, number: int) -> Metered:
        """Report, if the meter is on.

        Implements: LOAD-22.
        """
        if not self.on:
            return Metered({}, number)
        counts_E, trace = self.meter.counted(), self.meter.trace
        return Metered(self.meter.report(), number, counts_E, trace)

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Run the passes."""
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for metered_pass in passes:
            if metered_pass.kind == "abandon":
                self.running.clear()
                self.meter.abandon()
            elif metered_pass.kind == "backward":
                y, leaves, upstream = self.running.pop((metered_pass.layer, metered_pass.microbatch))
                gradients += torch.autograd.grad(y, leaves, upstream)
            else:
                outputs.append(self._forward(metered_pass))
        return MeteredResults(tuple(outputs), tuple(gradients))

    def _forward(self, metered_pass: MeteredPass) -> Tensor:
        assert metered_pass.x is not None
        assert metered_pass.ids_TK is not None
        assert metered_pass.weights_TK is not None
        asks = metered_pass.kind == "forward"
        x, weights_TK = (leaf.detach().requires_grad_(asks) for leaf in (metered_pass.x, metered_pass.weights_TK))
        metered = self.on and metered_pass.kind != "evaluation"
        expert = self.meter.watch(self.expert, metered_pass) if metered else self.expert

        def through(x: Tensor, weights_TK: Tensor) -> Tensor:
            assert metered_pass.ids_TK is not None
            return self.exchange(x, Routing(metered_pass.ids_TK, weights_TK, self.config.experts), expert)

        with torch.set_grad_enabled(metered_pass.kind != "evaluation"):
            y: Tensor = _Recompute.apply(through, x, weights_TK) if metered_pass.recomputed else through(x, weights_TK)  # type: ignore[no-untyped-call]
        if asks:
            assert metered_pass.upstream is not None
            self.running[metered_pass.layer, metered_pass.microbatch] = y, (x, weights_TK), metered_pass.upstream
        return y.detach()


def _double(delivery: Delivery) -> Tensor:
    return (delivery.rows_RD * 2).reshape(delivery.shape)


@offers("load_meter", maps=None)
def load_meter(session: NativeSession, config: Config) -> MeteredExchange:
    """Build the exchange with native's meter attached."""
    meter = session.use(Meter)(session.topology, config, session.device)
    return session.use(MeteredExchange)(config, session.exchange(config), meter)
