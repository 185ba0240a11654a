"""Counters of shortcuts that are on at first, count twice, or change what they count."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.experts import Derived, Experts  # type: ignore[attr-defined]
from moe_conformance.contract import Config, Topology
from self_tests.planted_bugs.plant import EP2_EDP2, SINGLE, Expectation, planted

_RUN = "shortcuts-counted"


@planted(Expectation("FAST-16", _RUN, "experts", "expected 0: counters are off"), layout=SINGLE)
class CountersAlwaysOn(Experts):
    """Counters are on from the beginning, whoever asks."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        self.counters.enable(True)


@planted(Expectation("FAST-16", _RUN, "experts", "equal_counts was taken 2 times and not taken 0 times"), layout=SINGLE)
class DecisionsCountedTwice(Experts):
    """A decision is counted where it is made, and once more where its path begins."""

    def _looked_up(self) -> Derived:
        self.counters.decided("equal_counts", taken=True)
        return super()._looked_up()


@planted(
    Expectation("FAST-16", _RUN, "experts", "equal_counts was taken 1 times and not taken 0 times; expected 0 and 1"),
    layout=SINGLE,
)
class TakenWhateverTheCounts(Experts):
    """The decision is counted before the counts are looked at: as taken whenever there are no gradients."""

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        decided = self.counters.decided
        self.counters.decided = lambda shortcut, taken: decided(shortcut, taken=True)  # type: ignore[method-assign, misc]
        try:
            return super()._run(rows_PD, counts_N)
        finally:
            self.counters.decided = decided  # type: ignore[method-assign]


@planted(
    Expectation("FAST-16", _RUN, "experts", "derived_weights has 1 hits and 0 misses; expected 0 and 1"), layout=SINGLE
)
class HitsBehindChanges(Experts):
    """A look-up is a hit as soon as anything is kept, also of weights that have changed since."""

    def _looked_up(self) -> Derived:
        kept = self.derived.made is not None
        derived = self.derived.of(self.gate_NFD, self.up_NFD, self.down_NDF)
        self.counters.looked_up("derived_weights", hit=kept)
        return derived


@planted(Expectation("FAST-16", _RUN, "experts", "expected 0: counters are off"), layout=EP2_EDP2)
class EveryRankCounts(Experts):
    """The ranks that were asked for are ignored: all of them count."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        self.counters.restrict = lambda ranks: None  # type: ignore[method-assign]


@planted(Expectation("FAST-16", _RUN, "experts", "gives other bits while it is counted"), layout=SINGLE)
class CountedCallsTakeTheLoop(Experts):
    """Where calls are counted, a hook between the products has them computed one expert at a time."""

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        if not self.counters.counts:
            return super()._run(rows_PD, counts_N)
        super()._run(rows_PD, counts_N)
        with torch.autocast("cpu", torch.bfloat16):
            return self._loop(rows_PD, counts_N).to(rows_PD.dtype)
