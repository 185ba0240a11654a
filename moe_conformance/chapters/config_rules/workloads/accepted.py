"""The settings that are run where they are accepted: those of the rules that a layer on two ranks has to do with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from moe_conformance.chapters.config_rules.workloads.settings import examples
from moe_conformance.contract import Config, Settings
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, Chapter
from moe_conformance.workloads.layers import layer_batch, layer_parameters
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import AcceptedStep
from moe_conformance.workloads.records.workload import Batch, Call, Drawn, Workload
from moe_conformance.workloads.selection.profiles import Profile

NAME = "accepted-settings"
# Rules that leave a choice between a refusal and what is asked for, and whose settings a layer on two ranks can have.
RUN_RULES = tuple(f"RULE-{number:02}" for number in (*range(8, 19), *range(20, 23)))

_ON = Settings(overlap=True, ep=2)
_DEFERRED = replace(_ON, defer_weight_gradients=True)
_OFF = Settings(ep=2)  # in whose place options have an effect, and others are without
FULL = replace(_ON, recompute="full", recompute_method="uniform", recompute_layers=1)
# Overlap with one further option: those of OVLP-15.
WITH_OPTIONS = (
    _DEFERRED,
    FULL,
    replace(_ON, recompute="selective", recompute_modules=("moe",)),
    replace(_ON, recompute="selective", recompute_modules=("layernorm",)),
    replace(_ON, prediction_layers=1),
    replace(_ON, capture=("router",)),
    replace(_ON, capture=("attention",)),
    replace(_ON, offload_first_product=True),
)
# Beside the examples of a rule, which are of models and devices: recomputation that can be had, and nothing of it all.
_FURTHER = {
    "RULE-11": (FULL,),
    "RULE-14": (_ON,),
    "RULE-18": (_ON,),
    "RULE-21": (_DEFERRED,),
    "RULE-22": (_DEFERRED,),
}
_TOKENS = ((5, 7), (6, 4))  # by microbatch and rank


def of_rule(rule: str) -> tuple[Settings, ...]:
    """Return the settings that try a rule and that two ranks of one stage can have."""
    found = [settings for settings in examples(rule) if settings.ep == 2 and settings.pp == 1]
    return (*found, *_FURTHER.get(rule, ()))


def run_settings() -> tuple[Settings, ...]:
    """Return all settings that are run, without repetitions."""
    of_rules = [settings for rule in RUN_RULES for settings in of_rule(rule)]
    return tuple(dict.fromkeys((_OFF, _ON, replace(_ON, shared_experts=1), *WITH_OPTIONS, *of_rules)))


def without(settings: Settings, option: str) -> Settings:
    """Return the settings with which an option has no effect, the others alike."""
    if option == "recompute":
        return replace(settings, recompute="none", recompute_method=None, recompute_layers=None, recompute_modules=())
    default = getattr(Settings(), option)
    return replace(settings, **{option: default})


def accepted(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the one workload, on two ranks."""
    del profile
    if layout == EP2:
        yield _drawn(layout).through(variant)


@lru_cache(maxsize=2)
def _drawn(layout: Layout) -> Workload:
    config = Config(hidden=16, dtype=torch.bfloat16)
    with_shared = config.changed({"shared.ffn": (config.ffn,)})  # not all settings have shared experts
    parameters = layer_parameters(with_shared, draw.generator(NAME, layout.name, "layer"))

    def batch(m: int, rank: int) -> Batch:
        return layer_batch(_TOKENS[m][rank], config, parameters, draw.generator(NAME, layout.name, m, rank))

    return Workload(
        NAME,
        AcceptedStep(),
        config,
        layout,
        Drawn(_TOKENS, batch),
        "F0 B0 F1 B1",
        {(f"layer0/{name}", expert): value for (name, expert), value in parameters.items()},
        calls=tuple(Call("step", ({"asked": settings},) * layout.world) for settings in run_settings()),
        shows=frozenset(RUN_RULES),
    )


CHAPTERS = (Chapter((AcceptedStep(),), (NAME,), accepted, quick=(EP2,)),)
