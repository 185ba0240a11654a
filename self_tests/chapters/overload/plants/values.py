"""Load meters that take another denominator, another order of reductions, or passes that are none of the step's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native.meter import Meter, MeteredExchange, Recorded
from moe_conformance.contract import Metered, MeteredPass, MeteredResults
from self_tests.planted_bugs.plant import EP2_ETP2, Expectation, planted


@planted(
    Expectation("LOAD-01", "load-entries", "run", "max_overload_factor is", "instead of 1", "expected value: K or ep")
)
class OwnTokensForBalance(Meter):
    """The balanced count is made of the rank's own tokens, not of those of its exchange group."""

    def _summed(self, entries: Sequence[Recorded]) -> tuple[Tensor, Tensor]:
        pairs_nC, _ = super()._summed(entries)
        return pairs_nC, torch.tensor([each.tokens for each in entries], dtype=torch.float64)


@planted(
    Expectation(
        "LOAD-02", "load-entries", "run", "max_overload_factor is 2 instead of 1", "expected value: K or ep or etp"
    ),
    real="Megatron-LM, pull request log_overload_factor: tokens over the size of the group, which has etp shards too",
    layout=EP2_ETP2,
)
class BalanceWithoutShards(Meter):
    """The balanced count is divided by all ranks of the group, so that perfect balance reads etp."""

    def _balanced(self, tokens_n: Tensor) -> Tensor:
        return super()._balanced(tokens_n) / self.topology.sizes["etp"]


@planted(Expectation("LOAD-05", "load-dropped", "run", "avg_overload_factor is"))
class DroppedTokensNotBalanced(MeteredExchange):
    """A token that lost a slot is not counted in the balanced share."""

    def _forward(self, each: MeteredPass) -> Tensor:
        assert each.ids_TK is not None
        lost_T = (each.ids_TK < 0).any(1)
        return super()._forward(replace(each, padding_T=lost_T))


@planted(Expectation("LOAD-06", "load-steps", "run", "avg_overload_factor is"))
class MeanOfLayerMeans(Meter):
    """The average is the mean of the layers' means, whatever their numbers of entries."""

    def _named(self, sums_2L: Tensor, largest: Sequence[float], peak: float) -> dict[str, float]:
        values = super()._named(sums_2L, largest, peak)
        means = [value for name, value in values.items() if "avg_overload_factor_layer" in name]
        return values | {"moe/avg_overload_factor": sum(means) / max(len(means), 1)}


@planted(
    Expectation("LOAD-07", "load-steps", "run", "max_overload_factor is"),
    real="Megatron-LM, pull request log_overload_factor, review: counts summed before the maximum",
)
class MaximumOfMeans(Meter):
    """The maximum is taken of the layers' means, which average the worst microbatch away."""

    def _named(self, sums_2L: Tensor, largest: Sequence[float], peak: float) -> dict[str, float]:
        values = super()._named(sums_2L, largest, peak)
        means = [value for name, value in values.items() if "avg_overload_factor_layer" in name]
        return values | {"moe/max_overload_factor": max(means, default=0.0)}


@planted(
    Expectation("LOAD-08", "load-steps", "run", "max_cum_overload_factor is"),
    real="Megatron-LM, pull request log_overload_factor: backward events that are not recorded",
)
class BackwardsNotRecorded(Meter):
    """Backwards take nothing away, and both sums only grow."""

    def completed(self, entry: int) -> None:
        """Record nothing."""


@planted(
    Expectation("LOAD-09", "load-uneven-tokens", "run", "max_cum_overload_factor is", "instead of 1"),
    real="Megatron-LM, pull request log_overload_factor: the cumulative factor divides by the rank's own tokens",
)
class PeakOfOwnTokens(Meter):
    """The balanced peak is that of the rank's own tokens."""

    def _peak(
        self,
        layers: Sequence[int | None],
        events: Sequence[tuple[int, int]],
        pairs_n: Sequence[float],
        balanced_n: Sequence[float],
    ) -> float:
        own_n = [float(self.config.top_k * tokens) for tokens in self.own_tokens]
        return super()._peak(layers, events, pairs_n, own_n)

    def _summed(self, entries: Sequence[Recorded]) -> tuple[Tensor, Tensor]:
        self.own_tokens = [each.tokens for each in entries]
        return super()._summed(entries)


@planted(Expectation("LOAD-10", "load-steps", "run", "avg_overload_factor is"))
class CountsAveragedFirst(Meter):
    """Every rank averages its pairs over the step before the largest rank is found."""

    def _factors(self, pairs_nC: Tensor, balanced_n: Tensor) -> Tensor:
        return super()._factors(pairs_nC.mean(0, keepdim=True).expand_as(pairs_nC), balanced_n)


@planted(
    Expectation("LOAD-11", "load-steps", "run", "step 3: avg_overload_factor is"),
    real="Megatron-LM, pull request log_overload_factor: entries must divide by the number of layers",
)
class EntriesMadeDivisible(Meter):
    """Entries beyond a multiple of the number of layers are left out."""

    def report(self) -> dict[str, float]:
        """Cut the last ones."""
        layers = {each.layer for each in self.entries}
        kept = len(self.entries) - len(self.entries) % max(len(layers), 1)
        self.entries = self.entries[:kept]
        self.events = [(entry, sign) for entry, sign in self.events if entry < kept]
        return super().report()


@planted(Expectation("LOAD-17", "load-alone", "run", "max_cum_overload_factor is"))
class NothingTakenBack(Meter):
    """A forward without a gradient is added to the timeline, and nothing takes it away."""

    def arrived(self, forward: MeteredPass, flows: bool) -> int:
        """Add it in any case."""
        return super().arrived(forward, True)


@planted(
    Expectation("LOAD-18", "load-evaluation", "run", "avg_overload_factor is", "forwards in evaluation are counted")
)
class EvaluationCounted(MeteredExchange):
    """Passes in evaluation mode are recorded as those of training are."""

    def _forward(self, each: MeteredPass) -> Tensor:
        return super()._forward(replace(each, kind="alone") if each.kind == "evaluation" else each)


@planted(Expectation("LOAD-24", "load-steps", "run", "layer_1 is", "instead of"))
class LayersReversed(Meter):
    """Layers are numbered from the last."""

    def _named(self, sums_2L: Tensor, largest: Sequence[float], peak: float) -> dict[str, float]:
        return super()._named(sums_2L.flip(1), largest, peak)


@planted(Expectation("LOAD-25", "load-steps", "run", "the name max_cum_overload_factor is missing"))
class AnotherName(MeteredExchange):
    """The cumulative factor is reported under another name."""

    def report(self, number: int) -> Metered:
        """Rename it."""
        values = super().report(number).values
        return Metered({name.replace("max_cum", "cum_max"): value for name, value in values.items()}, number)


@planted(Expectation("LOAD-28", "load-abandoned", "run", "avg_overload_factor is"))
class AttemptKept(MeteredExchange):
    """What an abandoned attempt recorded stays for the next report."""

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Forget the outputs only."""
        *lost, last = [place for place, each in enumerate(passes) if each.kind == "abandon"] or [-1]
        assert not lost
        first = super().run(passes[: max(last, 0)])
        self.running.clear()
        second = super().run(passes[last + 1 :])
        return MeteredResults(first.outputs + second.outputs, first.gradients + second.gradients)


@planted(Expectation("LOAD-25", "load-steps", "run", "step"))
class StepOfTheNext(MeteredExchange):
    """A report has the number of the step that begins."""

    def report(self, number: int) -> Metered:
        """Add one."""
        return replace(super().report(number), step=number + 1)


@planted(Expectation("LOAD-24", "load-steps", "run", "max_overload_factor_layer_"))
class LargestOfAllLayers(Meter):
    """Every layer has the largest factor of all layers."""

    def _named(self, sums_2L: Tensor, largest: Sequence[float], peak: float) -> dict[str, float]:
        return super()._named(sums_2L, [max(largest, default=0.0)] * len(largest), peak)
