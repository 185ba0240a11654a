"""Load meters that record passes twice, late or not at all, or count what is no load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from moe_conformance.backends.native.meter import Meter, MeteredExchange
from moe_conformance.contract import Delivery, ExpertFn, Metered, MeteredPass
from self_tests.planted_bugs.plant import EP2_ETP2, TP2_EP2, Expectation, planted

# ---- what is counted -------------------------------------------------------------------------------------------------


@planted(Expectation("LOAD-03", "load-forms", "run", "avg_overload_factor_layer_0 is"))
class FirstDimensionForTokens(Meter):
    """The number of tokens is the first dimension of x, whatever its shape."""

    def _tokens(self, forward: MeteredPass) -> int:
        assert forward.x is not None
        return len(forward.x) if forward.x.dim() > 2 else super()._tokens(forward)


@planted(
    Expectation("LOAD-03", "load-padded-tokens", "run", "avg_overload_factor is"),
    Expectation("LOAD-04", "load-padded-tokens", "run", "avg_overload_factor is"),
    real="Megatron-LM, pull request log_overload_factor, review: tokens are read off a map after the dispatch",
)
class PaddedMapForBalance(MeteredExchange):
    """The number of tokens is that of the rows of the map that was dispatched, which has been padded to one size."""

    def _forward(self, each: MeteredPass) -> Tensor:
        assert each.padding_T is not None
        rows = len(each.padding_T)
        if hasattr(self.attached, "padding"):
            rows = self.attached.padding.count(rows)
        return super()._forward(replace(each, padding_T=torch.zeros(rows, dtype=torch.bool)))


@planted(Expectation("LOAD-01", "load-entries", "run", "rank 0: step 0: avg_overload_factor is"), layout=TP2_EP2)
class FirstRankOfTpAlone(Meter):
    """Of the ranks of tp the first alone is counted, whether they hold the same tokens or not."""

    def _tokens(self, forward: MeteredPass) -> int:
        return super()._tokens(forward) if self.topology.rank == min(self.topology.ranks("tp")) else 0


@planted(Expectation("LOAD-03", "load-copies", "run", "max_cum_overload_factor is"), layout=TP2_EP2)
class CopiesBringTokens(Meter):
    """Of two tp ranks that hold the same tokens both bring them to the balanced count, and one brings the pairs."""

    def _tokens(self, forward: MeteredPass) -> int:
        assert forward.padding_T is not None
        return int((~forward.padding_T).sum())


@planted(
    Expectation("LOAD-04", "load-forms", "run", "avg_overload_factor is", "padding tokens are counted"),
    real="PrimeIntellect-ai/prime-rl #1332: padding tokens are counted",
)
class PaddingBrought(Meter):
    """Padding counts among the tokens of a rank."""

    def _tokens(self, forward: MeteredPass) -> int:
        assert forward.padding_T is not None
        return len(forward.padding_T)


@planted(Expectation("LOAD-04", "load-padded-experts", "run", "max_overload_factor is"))
class RowsForPairs(Meter):
    """The load is the number of rows that arrive for the experts, those that pad an expert to its capacity too."""

    def watch(self, expert: ExpertFn, forward: MeteredPass) -> ExpertFn:
        """Count them in place of the pairs."""
        watched = super().watch(expert, forward)
        E, held = self.config.experts, self.config.experts // self.topology.sizes["ep"]

        def counting(delivery: Delivery) -> Tensor:
            first = self.topology.ranks("ep").index(self.topology.rank) * held
            self.rows_E = torch.bincount(delivery.ids_RJ[delivery.ids_RJ >= 0] + first, minlength=E)
            return watched(delivery)

        return counting

    def _counts(self, ids_TK: Tensor) -> Tensor:
        return self.rows_E


# ---- what is recorded ------------------------------------------------------------------------------------------------


@planted(
    Expectation("LOAD-15", "load-received-nothing", "run", "max_cum_overload_factor is"),
    real="Megatron-LM, pull request log_overload_factor: backward events that are not recorded",
)
class BackwardWithoutRowsNotRecorded(Meter):
    """A rank that received no row has no backward event."""

    def watch(self, expert: ExpertFn, forward: MeteredPass) -> ExpertFn:
        """Note which entries have no rows."""
        watched = super().watch(expert, forward)
        self.rowless: set[int] = getattr(self, "rowless", set())

        def noting(delivery: Delivery) -> Tensor:
            place = len(self.entries)
            self.rowless = (self.rowless if place else set()) | (set() if len(delivery.rows_RD) else {place})
            return watched(delivery)

        return noting

    def completed(self, entry: int) -> None:
        """Leave them out."""
        if entry not in self.rowless:
            super().completed(entry)


@planted(Expectation("LOAD-15", "load-steps", "run", "avg_overload_factor is"))
class HookedTwice(Meter):
    """The hook is on the input of dispatch and on that of the experts, in layers with an even number."""

    def arrived(self, forward: MeteredPass, flows: bool) -> int:
        """Record it once more."""
        if forward.layer is not None and forward.layer % 2 == 0:
            super().arrived(forward, flows)
        return super().arrived(forward, flows)


@planted(
    Expectation(
        "LOAD-16", "load-recomputed", "run", "avg_overload_factor is", "that recomputation runs again is counted"
    ),
    Expectation("LOAD-29", "load-recomputed", "run", "the counter of pairs per expert has"),
)
class RepeatedForwardRecorded(Meter):
    """A forward that is repeated for its backward is recorded again."""

    def watch(self, expert: ExpertFn, forward: MeteredPass) -> ExpertFn:
        """Record every time."""
        watched = super().watch(expert, forward)
        seen: list[int] = []

        def recording(delivery: Delivery) -> Tensor:
            if seen:
                self.arrived(forward, False)
            seen.append(1)
            return watched(delivery)

        return recording


@planted(Expectation("LOAD-19", "load-reused-buffers", "run", "avg_overload_factor is"))
class CountedAtTheReport(Meter):
    """Events keep the ids of the caller, and pairs are counted when the report is made."""

    given: Mapping[int, Tensor | None] = MappingProxyType({})

    def arrived(self, forward: MeteredPass, flows: bool) -> int:
        """Keep the ids."""
        entry = super().arrived(forward, flows)
        self.given = {**(self.given if entry else {}), entry: forward.ids_TK}  # a report begins anew
        return entry

    def report(self) -> dict[str, float]:
        """Count them."""
        for number, entry in enumerate(self.entries):
            ids_TK = self.given[number]
            assert ids_TK is not None
            self.entries[number] = replace(entry, counts_E=self._counts(ids_TK))
        return super().report()


@planted(Expectation("LOAD-19", "load-reused-buffers", "run", "avg_overload_factor is"))
class CountsInOneBuffer(Meter):
    """Events keep the buffer of counts, which the next microbatch writes into."""

    def _counts(self, ids_TK: Tensor) -> Tensor:
        counts_E = super()._counts(ids_TK)
        self.buffer_E = getattr(self, "buffer_E", torch.zeros_like(counts_E)).copy_(counts_E)
        return self.buffer_E


@planted(Expectation("LOAD-20", "load-steps", "run", "max_cum_overload_factor is"))
class OldestForwardTakenBack(Meter):
    """A backward takes away the forward that is in flight for the longest time, and not its own."""

    def completed(self, entry: int) -> None:
        """Look for it."""
        done = [number for number, sign in self.events if sign < 0]
        super().completed(next(number for number, sign in self.events if sign > 0 and number not in done))


@planted(Expectation("LOAD-20", "load-steps", "run", "max_cum_overload_factor is"))
class BackwardsSortedByLayer(Meter):
    """Events are sorted by layer before the peak is looked for, as if layers ran one after the other."""

    def report(self) -> dict[str, float]:
        """Sort them."""
        self.events.sort(key=lambda event: self.entries[event[0]].layer or 0)
        return super().report()


# ---- counters --------------------------------------------------------------------------------------------------------


@planted(Expectation("LOAD-29", "load-recomputed", "run", "the counter of pairs per expert has"))
class EvaluationInCounter(MeteredExchange):
    """The counter goes on in evaluation mode."""

    evaluated: tuple[Tensor, ...] = ()

    def _forward(self, each: MeteredPass) -> Tensor:
        if each.kind == "evaluation" and each.ids_TK is not None:
            self.evaluated += (self.meter._counts(each.ids_TK),)
        return super()._forward(each)

    def report(self, number: int) -> Metered:
        """Add what it counted."""
        report = super().report(number)
        assert report.counts_E is not None
        return replace(report, counts_E=sum(self.evaluated, report.counts_E))


@planted(
    Expectation("LOAD-30", "load-recomputed", "run", "the router trace has other experts in the record of layer 0")
)
class TraceOfLastMicrobatch(Meter):
    """The trace keeps the ids in one place for each layer, and files that under every microbatch."""

    def arrived(self, forward: MeteredPass, flows: bool) -> int:
        """Write the newest ids into all records of the layer."""
        entry = super().arrived(forward, flows)
        assert forward.ids_TK is not None
        self.trace |= {label: forward.ids_TK for label in self.trace if label[0] == forward.layer}
        return entry


@planted(Expectation("LOAD-30", "load-recomputed", "run", "the router trace has no record of layer 1, microbatch 8"))
class TraceOfFullBatchesOnly(Meter):
    """A forward with padding is not traced."""

    def arrived(self, forward: MeteredPass, flows: bool) -> int:
        """Drop its record."""
        entry = super().arrived(forward, flows)
        assert forward.layer is not None
        assert forward.padding_T is not None
        if bool(forward.padding_T.any()):
            del self.trace[forward.layer, forward.microbatch]
        return entry


@planted(Expectation("LOAD-30", "load-dropped", "run", "the router trace has other experts in the record of layer 0"))
class TraceBeforeDrops(Meter):
    """The trace has an expert for every slot, also for those that a capacity dropped before the dispatch."""

    def arrived(self, forward: MeteredPass, flows: bool) -> int:
        """Fill the slots that are empty."""
        entry = super().arrived(forward, flows)
        self.trace = {label: ids_TK.clamp_min(0) for label, ids_TK in self.trace.items()}
        return entry


@planted(
    Expectation("LOAD-30", "load-steps", "run", "the router trace has a record of layer 0, microbatch 0, which did")
)
class TraceNeverForgotten(Meter):
    """A report leaves the trace of its step, which is in the next one too."""

    def report(self) -> dict[str, float]:
        """Keep the trace."""
        kept, values = self.trace, super().report()
        self.trace = kept
        return values


@planted(Expectation("LOAD-02", "load-entries", "run", "max_overload_factor is"), layout=EP2_ETP2)
class PairsOverShards(Meter):
    """Every shard of an expert counts its part of the expert's pairs."""

    def _counts(self, ids_TK: Tensor) -> Tensor:
        return super()._counts(ids_TK) // self.topology.sizes["etp"]


@planted(Expectation("LOAD-05", "load-dropped", "run", "overload_factor is"))
class DroppedPairsToTheFirst(Meter):
    """A dropped pair counts as one of expert 0."""

    def _counts(self, ids_TK: Tensor) -> Tensor:
        return super()._counts(ids_TK.clamp_min(0))


@planted(Expectation("LOAD-17", "load-alone", "run", "avg_overload_factor is"))
class AloneNotCounted(Meter):
    """A training forward that no backward follows is not recorded."""

    def watch(self, expert: ExpertFn, forward: MeteredPass) -> ExpertFn:
        """Leave it out."""
        return expert if forward.kind == "alone" else super().watch(expert, forward)
