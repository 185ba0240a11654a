"""Load meters whose reports go wrong where ranks differ, cost too much, or change what they observe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.meter import Meter, MeteredExchange, Recorded
from moe_conformance.contract import Delivery, ExpertFn, Metered, MeteredPass, MeteredResults
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted

PP2_EP2 = Layout(4, pp=2, ep=2)
ENTRIES: list[Recorded] = []
EVENTS: list[tuple[int, int]] = []

# ---- ranks that recorded different passes ----------------------------------------------------------------------------


@planted(Expectation("LOAD-12", "load-uneven-ranks", "run", "step 0: avg_overload_factor is"), layout=EP2_EDP2)
class MeanOfSlices(Meter):
    """Every slice has its own mean of each layer, and these are averaged."""

    def _reduced(self, values: Sequence[float], group: str, how: Any) -> Tensor:
        if group == "edp":
            sums, counts = values[: len(values) // 2], values[len(values) // 2 :]
            means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
            values = [*means, *(min(count, 1) for count in counts)]
        return super()._reduced(values, group, how)


@planted(
    Expectation(
        "LOAD-12", "load-uneven-ranks", "run", "a report although the ranks of its exchange group recorded different"
    )
)
class MissingEntriesFilledIn(Meter):
    """A rank with fewer entries than others of its group adds empty ones, so that reductions have one size."""

    def report(self) -> dict[str, float]:
        """Add them."""
        number = torch.tensor([len(self.entries)])
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self.topology.group("ep_etp"))
        none_E = torch.zeros(self.config.experts, dtype=torch.int64)
        self.entries += [Recorded(0, none_E, 0)] * (int(number) - len(self.entries))
        return super().report()


@planted(
    Expectation("LOAD-13", "load-idle-stage", "run", "rank 2: step 2: max_overload_factor is"),
    real="Megatron-LM, pull request log_overload_factor: ranks without layers must join the collective over stages",
    layout=PP2_EP2,
)
class IdleRanksStayAway(Meter):
    """A rank that has recorded nothing takes no part in the report: its next one meets this one of the others."""

    def report(self) -> dict[str, float]:
        """Return at once."""
        return super().report() if self.entries else {}


@planted(Expectation("LOAD-13", "load-idle-stage", "run", "max_cum_overload_factor is inf"), layout=PP2_EP2)
class IdleRanksHaveAllLoad(Meter):
    """A rank without entries brings infinity into the maximum, which is the identity of a minimum."""

    def _peak(
        self,
        layers: Sequence[int | None],
        events: Sequence[tuple[int, int]],
        pairs_n: Sequence[float],
        balanced_n: Sequence[float],
    ) -> float:
        return super()._peak(layers, events, pairs_n, balanced_n) if events else float("inf")


# ---- what a report covers --------------------------------------------------------------------------------------------


@planted(Expectation("LOAD-23", "load-two-meters", "run", "max_overload_factor is"))
class OneListForAllMeters(Meter):
    """Entries and events are in lists of the module, which all meters of a process share."""

    def abandon(self) -> None:
        """Empty the lists."""
        super().abandon()
        ENTRIES.clear()
        EVENTS.clear()
        self.entries, self.events = ENTRIES, EVENTS

    def report(self) -> dict[str, float]:
        """Take what is in them."""
        self.entries, self.events = list(ENTRIES), list(EVENTS)
        return super().report()


@planted(
    Expectation(
        "LOAD-23", "load-switched", "run", "step 3: avg_overload_factor is", "entries of earlier reports are counted"
    )
)
class FirstStepKept(Meter):
    """A report does not forget entries, of which averages go on."""

    def report(self) -> dict[str, float]:
        """Put them back."""
        entries = self.entries
        values = super().report()
        self.entries = entries
        return values


# ---- values ----------------------------------------------------------------------------------------------------------


@planted(Expectation("LOAD-14", "load-entries", "run", "step 4: avg_overload_factor is nan instead of 0"))
class NothingOverNothing(Meter):
    """The factor of an entry without tokens is 0 / 0."""

    def _factors(self, pairs_nC: Tensor, balanced_n: Tensor) -> Tensor:
        return pairs_nC.amax(1) / balanced_n


@planted(Expectation("LOAD-14", "load-steps", "run", "avg_overload_factor is"))
class HalfPrecision(Meter):
    """Values are reduced in bfloat16."""

    def _reduced(self, values: Sequence[float], group: str, how: Any) -> Tensor:
        return super()._reduced(values, group, how).bfloat16().double()


@planted(Expectation("LOAD-14", "load-entries", "run", "avg_overload_factor is"))
class CoarseGuard(Meter):
    """A constant is added to every denominator, and is large enough to be seen."""

    def _balanced(self, tokens_n: Tensor) -> Tensor:
        return super()._balanced(tokens_n) + 1e-4


# ---- cost and side effects -------------------------------------------------------------------------------------------


@planted(Expectation("LOAD-21", "load-switched", "gradient", "with the meter on and off"))
class NarrowGradients(Meter):
    """The hook's backward returns the gradient in bfloat16's precision."""

    def gradient(self, grad_RD: Tensor) -> Tensor:
        """Round it."""
        return grad_RD.bfloat16().to(grad_RD.dtype)


@planted(Expectation("LOAD-21", "load-switched", "combine", "y of forward", "with the meter on and off"))
class RowsObservedInBfloat16(Meter):
    """The rows are cast for what looks at them, and the cast goes on to the experts."""

    def watch(self, expert: ExpertFn, forward: MeteredPass) -> ExpertFn:
        """Hand the experts what was looked at."""
        watched = super().watch(expert, forward)

        def casting(delivery: Delivery) -> Tensor:
            rows_RD = delivery.rows_RD
            return watched(replace(delivery, rows_RD=rows_RD.bfloat16().to(rows_RD.dtype)))

        return casting


@planted(Expectation("LOAD-22", "load-switched", "run", "collectives with the meter on and"))
class ReducedInForwards(Meter):
    """Counts are reduced in every forward, and not in the report."""

    def arrived(self, forward: MeteredPass, flows: bool) -> int:
        """Reduce them as well."""
        entry = super().arrived(forward, flows)
        dist.all_reduce(self.entries[-1].counts_E.clone(), group=self.topology.group("ep_etp"))
        return entry


@planted(Expectation("LOAD-22", "load-switched", "run", "collectives with the meter off; expected 0"))
class ReportsWhileOff(MeteredExchange):
    """A meter that is off records nothing, and reports that."""

    def report(self, number: int) -> Metered:
        """Report in any case."""
        on, self.on = self.on, True
        report = super().report(number)
        self.on = on
        return report


@planted(Expectation("LOAD-22", "load-switched", "run", "step 3: avg_overload_factor is"))
class RecordsWhileOff(MeteredExchange):
    """Passes are recorded while the meter is off, and are in the next report."""

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Record in any case."""
        on, self.on = self.on, True
        results = super().run(passes)
        self.on = on
        return results


@planted(Expectation("LOAD-26", "load-steps", "run", "entries, calls", "another report calls"))
class EntriesReducedOneByOne(Meter):
    """Every entry has reductions of its own."""

    def _summed(self, entries: Sequence[Recorded]) -> tuple[Tensor, Tensor]:
        summed = [Meter._summed(self, [each]) for each in entries] or [Meter._summed(self, [])]
        return torch.cat([pairs_nC for pairs_nC, _ in summed]), torch.cat([tokens_n for _, tokens_n in summed])


@planted(Expectation("LOAD-27", "load-steps", "run", "collectives; at most 5 are needed"))
class ValuesReducedApart(Meter):
    """What could be stacked is reduced in two halves."""

    def _reduced(self, values: Sequence[float], group: str, how: Any) -> Tensor:
        half = len(values) // 2
        return torch.cat([Meter._reduced(self, part, group, how) for part in (values[:half], values[half:])])
