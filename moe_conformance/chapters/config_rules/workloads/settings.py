"""Settings that are resolved and never run: the oracle's examples of every rule, and all options one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import torch

from moe_conformance.contract import Config, Settings
from moe_conformance.contract.topology import Layout
from moe_conformance.reference.config_rules import cases
from moe_conformance.reference.config_rules.outcomes import FACTS
from moe_conformance.reference.config_rules.rules import Settings as Neutral
from moe_conformance.workloads.chapter import EP2, SINGLE, Chapter
from moe_conformance.workloads.records.runs import ON_CONFIG_RULES
from moe_conformance.workloads.records.workload import Call, Ref, Workload
from moe_conformance.workloads.selection.profiles import Profile

_LAYOUTS = (SINGLE, EP2)
_APART = Layout(2, tp=2)  # two ranks, each an ep group of its own: all of them have to agree nevertheless
_VERSIONS = "RULE-19"
_KERNELS = "RULE-24"

# For RULE-25 exchanges are built instead.
RULES = tuple(f"RULE-{number:02}" for number in range(6, 28) if number != 25)
# Rules whose broken settings a backend may change, with a warning.
CHANGING = ("RULE-06", "RULE-07", "RULE-15", "RULE-23", "RULE-24")
SHOWN, UNKNOWN, LATER, NAMED = "options-shown", "options-unknown", "options-changed", "options-changed-by-name"

_ON = Settings(overlap=True, ep=2)
_CAPTURED = replace(_ON, defer_weight_gradients=True, capture=("router",))


def workload_of(rule: str) -> str:
    """Return the name of the workload of a rule."""
    return rule.lower()


def asked(neutral: Neutral) -> Settings:
    """Return an example of the oracle as settings for a backend."""
    options: dict[str, Any] = {
        field.name: getattr(neutral, field.name) for field in fields(neutral) if field.name not in FACTS
    }
    scopes = neutral.capture
    return Settings(
        **{
            **options,
            "dtype": getattr(torch, neutral.dtype),
            "kernel": _kernel(neutral),
            "recompute_modules": tuple(sorted(neutral.recompute_modules)),
            "capture": None if scopes is None else tuple(sorted(scopes)),
        }
    )


def _kernel(neutral: Neutral) -> Literal["present", "absent", "freeing"] | None:
    if neutral.kernel is None:
        return None
    if neutral.kernel_frees_input:
        return "freeing"
    return "present" if all(neutral.kernel_present) else "absent"


def examples(rule: str) -> list[Settings]:
    """Return the settings that try a rule: alternately broken and mended, then others that fit; without repetitions."""
    if rule == _VERSIONS:
        assumed = ("2.5.1", "2.5.10", "2.6.0", "2.6.0a0+git12", "2.9.1", "2.10", "2.10.1", "3.0")
        found = [replace(options, versions=(("torch", text),)) for text in assumed for options in (_ON, _CAPTURED)]
        return [_ON, _CAPTURED, *found]
    pairs = [neutral for case in cases.cases() if case.rule == rule for neutral in (case.broken, case.mended)]
    uneven = [neutral for neutral in pairs if len({*neutral.kernel_present}) == 2]
    found = [asked(neutral) for neutral in pairs if neutral not in uneven]
    found += [asked(neutral) for of, neutral in cases.fits() if of == rule]
    if rule == "RULE-23":  # an absent kernel may also be named with these dispatchers
        found += [Settings(dispatcher=name, kernel="absent") for name in ("alltoall", "allgather")]
    return list(dict.fromkeys(found))


_ALONE: Mapping[str, tuple[Any, ...]] = {
    "experts": (4, None), "top_k": (1, 3), "dispatcher": ("allgather", "fused"), "pp": (2,), "ep": (2,),
    "dtype": (torch.float32, torch.float16), "shared_experts": (1, 2), "capture": (("attention",),),
    "offload_first_product": (True,), "attention_bias": (True,), "accumulate_in_product": (False,),
    "packed": (True,), "prediction_layers": (1,),
}  # fmt: skip
# Settings that differ from the default in options that native, or a real backend, may have.
_OPTIONS: tuple[Settings, ...] = (
    Settings(),
    *(Settings(**{name: value}) for name, values in _ALONE.items() for value in values),
    Settings(groups=4, groups_chosen=2),
    Settings(pp=2, virtual_stages=2),
    Settings(dispatcher="fused", kernel="present"),
    Settings(recompute="full", recompute_method="uniform", recompute_layers=1),
    Settings(recompute="full", recompute_method="block", recompute_layers=1),
    Settings(recompute="selective", recompute_modules=("layernorm",)),
    Settings(recompute="selective", recompute_modules=("moe",)),
    Settings(shared_experts=1, overlap_shared=True),
    _ON,
    replace(_ON, defer_weight_gradients=True),
)  # fmt: skip

# Settings with one unknown value or option.
_UNKNOWN = (
    Settings(dispatcher="alltoal"),
    Settings(dispatcher=""),
    Settings(recompute="selectiv"),
    Settings(recompute=""),
    Settings(recompute="full", recompute_method="unifrom", recompute_layers=1),
    Settings(recompute="selective", recompute_modules=("layernrom",)),
    Settings(recompute="selective", recompute_modules=("layernorm", "")),
    Settings(capture=("attentoin",)),
    Settings(capture=("attention", "")),
    Settings(extra=(("moe_token_dispacher", "alltoall"),)),
    Settings(extra=(("", 1),)),
)


# Changes of built layers, from and to. The last but one does not fit the layers, the last is invalid.
_CHANGES = (
    (Settings(), Settings(top_k=3)),
    (Settings(groups=4, groups_chosen=2), Settings(groups=2, groups_chosen=1)),
    (Settings(groups=4, groups_chosen=2), Settings()),
    (Settings(), Settings(experts=4)),
    (Settings(), Settings(top_k=9)),
)
# Changes of options under a library's own names, from the default.
_NAMED = (
    (Settings(), Settings(extra=(("experts_implementation", "batched_mm"),))),
    (Settings(), Settings(extra=(("experts_implementation", "batched"),))),
)
_LAYERS = 3


def _changes(changes: Sequence[tuple[Settings, Settings]], ranks: int) -> tuple[Call, ...]:
    """Return calls that build layers, show, change and show them, then build and show layers as they should be."""
    calls: list[Call] = []
    for before, to in changes:
        first = Ref(len(calls))
        then = Ref(len(calls) + 4)
        for method, given in (
            ("build", {"asked": before, "layers": _LAYERS}),
            ("shown", {"built": first}),
            ("change", {"built": first, "to": to}),
            ("shown", {"built": first}),
            ("build", {"asked": to, "layers": 1}),
            ("shown", {"built": then}),
        ):
            calls.append(Call(method, (given,) * ranks, may_raise=True))
    return tuple(calls)


def names() -> tuple[str, ...]:
    """Return the names of the workloads."""
    return (*map(workload_of, RULES), SHOWN, UNKNOWN, LATER, NAMED)


def draw(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant, on one rank and on two; on two without ep those of kernels alone."""
    del profile
    if layout not in (*_LAYOUTS, _APART):
        return
    config = Config(variant=variant)
    for rule in RULES if layout in _LAYOUTS else (_KERNELS,):
        alike = [(settings,) * layout.world for settings in examples(rule)]
        if rule == _KERNELS and layout.world > 1:
            kernel = Settings(dispatcher="fused", kernel="present")
            alike.append((kernel, *[replace(kernel, kernel="absent")] * (layout.world - 1)))
        name, calls = workload_of(rule), _calls(alike)
        yield Workload(name, ON_CONFIG_RULES, config, layout, (), calls=calls, shows=frozenset({rule}))
    if layout not in _LAYOUTS:
        return
    for name, options in ((SHOWN, _OPTIONS), (UNKNOWN, _UNKNOWN)):
        calls = _calls([(settings,) * layout.world for settings in options])
        yield Workload(name, ON_CONFIG_RULES, config, layout, (), calls=calls, shows=frozenset({name}))
    for name, changes in ((LATER, _CHANGES), (NAMED, _NAMED)):
        calls = _changes(changes, layout.world)
        yield Workload(name, ON_CONFIG_RULES, config, layout, (), calls=calls, shows=frozenset({LATER}))


def _calls(by_rank: Sequence[tuple[Settings, ...]]) -> tuple[Call, ...]:
    """Return calls for the limits of settings, each followed by one that resolves them."""
    found: list[Call] = []
    for ranks in by_rank:
        given = tuple({"asked": settings} for settings in ranks)
        found += [Call(method, given, may_raise=True) for method in ("limits", "resolve")]
    return tuple(found)


CHAPTERS = (Chapter((ON_CONFIG_RULES,), names(), draw, quick=(*_LAYOUTS, _APART)),)
