"""RULE: bugs in what overlap of an exchange does not go with."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_conformance.backends.native.config_rules import ConfigRules
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.contract import Settings
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted


class Changing(ConfigRules):
    """Puts other values in the place of some before anything is tested, and resolves to these."""

    def opened(self, asked: Settings) -> Settings:
        """Ask for other values where overlap is asked for."""
        return super().opened(self.instead(asked) if asked.overlap else asked)

    def instead(self, s: Settings) -> Settings:
        """Return what is asked for instead."""
        raise NotImplementedError


_BUILT = ("and is built on rank 0", "without an error; allowed: changed, refused")
_SILENT = "overlap = False instead of True"


@planted(Expectation("RULE-06", "rule-06", "run", "Settings(overlap=True) breaks RULE-06", *_BUILT), layout=SINGLE)
class OverlapOfNothing(ConfigRules):
    """Overlap is on with ep = 1, and a clean start is taken for proof that it overlaps."""

    def overlap_layout(self, s: Settings) -> None:
        super().overlap_layout(replace(s, ep=2))


@planted(
    Expectation("RULE-06", "rule-06", "run", "experts=2, ep=2, overlap=True) breaks no rule and is refused", "experts"),
    layout=SINGLE,
)
class ManyExpertsForOverlap(ConfigRules):
    """Overlap wants more experts on every rank than one."""

    def overlap_layout(self, s: Settings) -> None:
        if s.experts is not None and s.experts <= s.ep:
            raise CannotBuild(f"overlap with {s.experts} experts on ep = {s.ep}")
        super().overlap_layout(s)


@planted(Expectation("RULE-07", "rule-07", "run", "experts=None", "breaks RULE-07", *_BUILT), layout=SINGLE)
class OverlapOfADenseModel(ConfigRules):
    """A model without experts is taken for one with a sufficient number of them, on ranks that do not matter."""

    def overlap_layout(self, s: Settings) -> None:
        if s.experts is not None:
            super().overlap_layout(s)


@planted(
    Expectation("RULE-08", "rule-08", "run", "dispatcher='allgather'", _SILENT, "allowed: honoured, refused"),
    layout=SINGLE,
)
class NoOverlapOfAllGathers(Changing):
    """The step that overlaps is only chosen with other dispatchers than the all-gather."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, overlap=s.dispatcher != "allgather")


@planted(
    Expectation("RULE-09", "rule-09", "run", "dtype=torch.float16, overlap=True) breaks no rule and is refused"),
    layout=SINGLE,
)
class BFloat16Alone(ConfigRules):
    """Overlap is tied to one of the two half-precision dtypes."""

    def overlap_exchange(self, s: Settings) -> None:
        if s.dtype == torch.float16:
            raise CannotBuild("overlap is supported with bfloat16")
        super().overlap_exchange(s)


@planted(Expectation("RULE-09", "rule-09", "run", "dtype = torch.bfloat16 instead of torch.float32"), layout=SINGLE)
class CastForTheKernel(Changing):
    """Where a dtype does not go with overlap the model is cast to one that does."""

    def instead(self, s: Settings) -> Settings:
        return s if s.dtype == torch.float16 else replace(s, dtype=torch.bfloat16)


@planted(Expectation("RULE-10", "rule-10", "run", "pp=2, virtual_stages=1", _SILENT), layout=SINGLE)
class PlainScheduleForOneStage(Changing):
    """One virtual stage per rank runs the schedule without interleaving, which has no overlap."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, overlap=s.virtual_stages != 1)


@planted(Expectation("RULE-11", "rule-11", "run", "recompute = 'selective' instead of 'full'"), layout=SINGLE)
class LessRecomputation(Changing):
    """Full recomputation becomes selective where it does not fit."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, recompute="selective") if s.recompute == "full" else s


@planted(Expectation("RULE-12", "rule-12", "run", "recompute_method = None instead of 'uniform'"), layout=SINGLE)
class MethodOfNothing(Changing):
    """A method without recomputation is dropped."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, recompute_method=None)


@planted(Expectation("RULE-13", "rule-13", "run", "recompute_layers = None instead of 0"), layout=SINGLE)
class ZeroIsNotSet(Changing):
    """A number is tested by its truth, and 0 passes for none."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, recompute_layers=s.recompute_layers or None)


@planted(
    Expectation("RULE-14", "rule-14", "run", "recompute_modules=('layernorm',)", "breaks no rule and is refused"),
    layout=SINGLE,
)
class NoModuleAtAll(ConfigRules):
    """Overlap is refused with recomputation of any module, not only of the MoE layer."""

    def overlap_recomputation(self, s: Settings) -> None:
        if s.recompute_modules:
            raise CannotBuild(f"recompute_modules = {s.recompute_modules} does not go with overlap")
        super().overlap_recomputation(s)


@planted(
    Expectation("RULE-15", "rule-15", "run", "Settings(overlap_shared=True) breaks RULE-15", *_BUILT), layout=SINGLE
)
class OverlapOfNoSharedExperts(ConfigRules):
    """Overlap of shared experts is on where there are none."""

    def opened(self, asked: Settings) -> Settings:
        return asked if not asked.shared_experts else super().opened(asked)


@planted(
    Expectation("RULE-16", "rule-16", "run", "prediction_layers = 1 instead of 2"),
    Expectation("RULE-16", "rule-16", "run", "allowed: honoured, refused"),
    layout=SINGLE,
)
class OnePredictionLayer(Changing):
    """Of several layers of multi-token prediction the first is built."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, prediction_layers=s.prediction_layers and 1)


@planted(
    Expectation("RULE-16", "rule-16", "run", "prediction_layers=1", "breaks no rule and is refused"), layout=SINGLE
)
class NoPredictionLayerAtAll(ConfigRules):
    """Overlap is refused with any layer of multi-token prediction."""

    def overlap_model(self, s: Settings) -> None:
        if s.prediction_layers is not None:
            raise CannotBuild(f"prediction_layers = {s.prediction_layers} does not go with overlap")
        super().overlap_model(s)


@planted(Expectation("RULE-17", "rule-17", "run", "capture=()", "capture = None instead of ()"), layout=SINGLE)
class EmptyScopeIsNone(Changing):
    """An empty scope, which means the whole layer, is taken for no graph."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, capture=s.capture or None)


@planted(
    Expectation("RULE-17", "rule-17", "run", "capture=('attention',)", "breaks no rule and is refused"), layout=SINGLE
)
class NoGraphAtAll(ConfigRules):
    """Overlap is refused under any graph."""

    def overlap_model(self, s: Settings) -> None:
        if s.capture is not None:
            raise CannotBuild(f"capture = {s.capture} does not go with overlap")
        super().overlap_model(s)


@planted(
    Expectation("RULE-18", "rule-18", "run", "kernel='freeing'", "offload_first_product = False instead of True"),
    layout=SINGLE,
)
class OffloadingIsDropped(Changing):
    """The input that the kernel frees is not offloaded, though asked for."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, offload_first_product=s.offload_first_product and s.kernel != "freeing")
