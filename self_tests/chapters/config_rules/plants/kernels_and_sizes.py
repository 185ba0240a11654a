"""RULE: bugs in limits on versions, deferred weight gradients, kernels, and sizes of the routing."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_conformance.backends.native.config_rules import ConfigRules
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.contract import Settings
from moe_conformance.contract.topology import Layout
from self_tests.chapters.config_rules.plants.overlap import Changing
from self_tests.planted_bugs.plant import EP2, SINGLE, Expectation, planted

_BUILT = ("and is built on rank 0", "without an error; allowed: changed, refused")


@planted(
    Expectation(
        "RULE-19", "rule-19", "run", "Settings(ep=2, overlap=True) breaks no rule and is refused", "torch 2.6 is needed"
    ),
    layout=SINGLE,
)
class VersionsAsText(ConfigRules):
    """Versions are compared as text, in which 2.10 comes before 2.6."""

    def release(self, text: str) -> Any:
        return text


@planted(
    Expectation("RULE-19", "rule-19", "run", "versions=(('torch', '2.5.1'),)", "breaks RULE-19 and is built on rank 0"),
    layout=SINGLE,
)
class MajorVersionsAlone(ConfigRules):
    """Of versions the first number is compared."""

    def release(self, text: str) -> Any:
        return super().release(text)[:1]


@planted(Expectation("RULE-20", "rule-20", "run", "defer_weight_gradients = False instead of True"), layout=SINGLE)
class DeferredNever(ConfigRules):
    """Without overlap the switch of deferral is not read."""

    def opened(self, asked: Settings) -> Settings:
        return super().opened(replace(asked, defer_weight_gradients=asked.defer_weight_gradients and asked.overlap))


@planted(Expectation("RULE-21", "rule-21", "run", "accumulate_in_product = True instead of False"), layout=SINGLE)
class AccumulationIsSwitchedOn(Changing):
    """The weight-gradient product accumulates wherever a graph needs it, whatever was asked."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, accumulate_in_product=True) if s.capture else s


@planted(
    Expectation("RULE-22", "rule-22", "run", "attention_bias=True", "capture = None instead of ('attention',)"),
    layout=SINGLE,
)
class GraphIsDropped(Changing):
    """Attention with a bias is not captured."""

    def instead(self, s: Settings) -> Settings:
        return replace(s, capture=None) if s.attention_bias else s


@planted(
    Expectation("RULE-23", "rule-23", "run", "Settings(kernel='present') breaks RULE-23", *_BUILT),
    real="NVIDIA/Megatron-LM commit 326ec8c941 (#2286)",
    layout=SINGLE,
)
class NameOfNoDispatcher(ConfigRules):
    """A kernel's name beside another dispatcher is tested by the name of a dispatcher that there is not."""

    def opened(self, asked: Settings) -> Settings:
        return super().opened(asked) if asked.dispatcher == "all-to-all" else asked

    def kernel_present(self, s: Settings) -> None:
        if s.dispatcher == "fused":
            super().kernel_present(s)


@planted(
    Expectation(
        *("RULE-24", "rule-24", "run"),
        *("kernel='absent'", "with dispatcher = 'alltoall' instead of 'fused'", "allowed: changed"),
    ),
    layout=SINGLE,
)
class HalfAFallback(ConfigRules):
    """A kernel that is absent is replaced by another dispatcher, and its name stays behind."""

    def opened(self, asked: Settings) -> Settings:
        if asked.kernel == "absent" and asked.dispatcher == "fused":
            warnings.warn("the kernel is absent: the dispatcher is alltoall", stacklevel=2)
            return replace(asked, dispatcher="alltoall")
        return super().opened(asked)

    def kernel_present(self, s: Settings) -> None:
        if s.dispatcher == "fused":
            super().kernel_present(s)


@planted(Expectation("RULE-24", "rule-24", "run", "breaks RULE-24 and is built on rank 0"), layout=EP2)
class OwnKernelAlone(ConfigRules):
    """Every rank looks for the kernel on its own machine, and builds what the others cannot run."""

    def kernel_present(self, s: Settings) -> None:
        if s.kernel == "absent":
            raise CannotBuild("kernel is absent")


@planted(Expectation("RULE-24", "rule-24", "run", "breaks RULE-24 and is built on rank 0"), layout=Layout(2, tp=2))
class KernelAgreedOverEp(ConfigRules):
    """The ranks of an ep group agree on a kernel that is absent, and those of the world do not."""

    def kernel_present(self, s: Settings) -> None:
        if s.kernel is not None:
            absent = torch.tensor([float(s.kernel == "absent")])
            dist.all_reduce(absent, group=self.topology.group("ep"))
            if absent:
                raise CannotBuild("kernel is absent")


@planted(
    Expectation("RULE-26", "rule-26", "run", "Settings(top_k=9) breaks RULE-26", "top_k = 8 instead of 9"),
    layout=SINGLE,
)
class AsManyAsThereAre(ConfigRules):
    """K is cut to the number of experts."""

    def built(self, s: Settings) -> Settings:
        return super().built(s if not s.experts else replace(s, top_k=min(s.top_k, s.experts)))


@planted(Expectation("RULE-26", "rule-26", "run", "Settings(top_k=8) breaks no rule and is refused"), layout=SINGLE)
class FewerThanThereAre(ConfigRules):
    """K = E is refused, as if nothing were left to choose."""

    def built(self, s: Settings) -> Settings:
        if s.experts is not None and s.top_k >= s.experts:
            raise CannotBuild(f"top_k = {s.top_k} of {s.experts} experts")
        return super().built(s)


@planted(
    Expectation(
        "RULE-27", "rule-27", "run", "Settings(groups=4, groups_chosen=0) breaks RULE-27", "groups = None instead of 4"
    ),
    layout=SINGLE,
)
class GroupsByTruth(ConfigRules):
    """Groups limit the choice if their number chosen is not false, so that 0 and None are no limit."""

    def groups(self, s: Settings) -> tuple[int, int] | None:
        return super().groups(s) if s.groups_chosen else None


@planted(
    Expectation("RULE-27", "rule-27", "run", "top_k=5, groups=4, groups_chosen=2) breaks RULE-27", "refused"),
    layout=SINGLE,
)
class TooFewToChooseFrom(ConfigRules):
    """That the groups hold K experts is left to the kernel that selects."""

    def built(self, s: Settings) -> Settings:
        small = s.groups is not None and s.groups_chosen is not None and s.experts is not None and s.top_k <= s.experts
        return replace(super().built(replace(s, top_k=1)), top_k=s.top_k) if small else super().built(s)
