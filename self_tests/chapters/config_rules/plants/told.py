"""RULE: bugs in refusals, in what is resolved, in changes that nobody is told of, and in unknown options."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from moe_conformance.backends.native.config_rules import ConfigRules
from moe_conformance.contract import Settings
from self_tests.planted_bugs.plant import EP2, SINGLE, Expectation, planted


@planted(
    Expectation("RULE-01", "rule-11", "run", "is built on rank 1 and refused on rank 0", "recompute = 'full'"),
    layout=EP2,
)
class FirstRankAloneRefuses(ConfigRules):
    """Recomputation is tested where the configuration is printed, on the first rank; the others wait for it."""

    def overlap_recomputation(self, s: Settings) -> None:
        if self.topology.rank == 0:
            super().overlap_recomputation(s)


@planted(
    Expectation(
        "RULE-01", "rule-11", "run", "recompute='full'", "is refused by builtins.AssertionError without a message"
    ),
    layout=SINGLE,
)
class BareAssertion(ConfigRules):
    """Full recomputation is refused by an assertion that says nothing."""

    def overlap_recomputation(self, s: Settings) -> None:
        if s.recompute == "full":
            raise AssertionError
        super().overlap_recomputation(s)


@planted(
    Expectation("RULE-02", "options-shown", "run", "Settings(shared_experts=2) is resolved", "shared_experts = 1"),
    layout=SINGLE,
)
class SwitchForANumber(ConfigRules):
    """The number of shared experts is passed on as whether there are any."""

    def resolve(self, asked: Settings) -> Settings:
        return super().resolve(replace(asked, shared_experts=int(asked.shared_experts > 0)))


@planted(
    Expectation(
        "RULE-02", "options-shown", "run", "Settings(dtype=torch.float32) is resolved", "dtype = torch.bfloat16"
    ),
    real="pytorch/torchtitan commit d3c96e806 (#3199)",
    layout=SINGLE,
)
class ConverterOfNothing(ConfigRules):
    """The converter of the dtype selects modules of a kind that is not there, and all stays in bfloat16."""

    def resolve(self, asked: Settings) -> Settings:
        super().resolve(asked)
        return replace(asked, dtype=torch.bfloat16 if asked.dtype == torch.float32 else asked.dtype)


@planted(
    Expectation("RULE-03", "rule-23", "run", "is resolved without a warning to", "kernel = None on rank 0"),
    Expectation("RULE-15", "rule-15", "run", "overlap_shared = False instead of True without a warning"),
    layout=SINGLE,
)
class SwitchedOffInSilence(ConfigRules):
    """What cannot be had is switched off where the dispatcher is set up, and nobody is told."""

    def opened(self, asked: Settings) -> Settings:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().opened(asked)


@planted(
    Expectation(
        "RULE-04", "options-unknown", "run", "Settings(dispatcher='alltoal') is accepted", "dispatcher is not known"
    ),
    layout=SINGLE,
)
class ElseTheAllToAll(ConfigRules):
    """A dispatcher that is neither of the others is taken for the all-to-all."""

    def known(self, asked: Settings) -> None:
        other = asked.dispatcher not in ("allgather", "fused")
        super().known(replace(asked, dispatcher="alltoall") if other else asked)


@planted(
    Expectation(
        "RULE-04", "options-unknown", "run", "Settings(extra=(('moe_token_dispacher', 'alltoall'),)) is accepted"
    ),
    layout=SINGLE,
)
class OptionsThatAreNotLookedAt(ConfigRules):
    """A misspelt option is stored in the configuration, where nobody reads it."""

    def known(self, asked: Settings) -> None:
        super().known(replace(asked, extra=()))


@planted(
    Expectation("RULE-05", "options-changed", "run", "layer 1 on rank 0 has top_k = 2 instead of 3"),
    real="NVIDIA/Megatron-LM commit 301e0d658f (#6419)",
    layout=SINGLE,
)
class FirstLayerAlone(ConfigRules):
    """A change is made in one configuration, of which the other layers hold copies."""

    def change(self, built: list[Any], to: Settings) -> None:
        first = built[:1]
        super().change(first, to)
        built[:1] = first


@planted(
    Expectation("RULE-05", "options-changed", "run", "has experts = 4 instead of 8", "since the change raised"),
    layout=SINGLE,
)
class HalfAChange(ConfigRules):
    """Layers are changed one by one, and the second refuses what the first has accepted."""

    def change(self, built: list[Any], to: Settings) -> None:
        built[0] = self.router_of(self.resolve(to))
        super().change(built, to)


@planted(Expectation("RULE-05", "options-changed", "run", "layer 0 on rank 1 has top_k = 2 instead of 3"), layout=EP2)
class FirstRankChanges(ConfigRules):
    """The change is made where the command is read, on the first rank."""

    def change(self, built: list[Any], to: Settings) -> None:
        if self.topology.rank == 0:
            super().change(built, to)
