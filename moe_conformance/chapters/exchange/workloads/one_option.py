"""Exchanges whose configs differ from a base config in exactly one option, a knob.

Where weights are applied, how rows are permuted, and what is padded are independent. A fault that shows with one of
these configs and not with the base is caused by that option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, EP2_ETP2, SINGLE, Chapter
from moe_conformance.workloads.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile

EXTRA = "extra."  # begins an option that only some backends know: it goes into `Config.extra`

# The option of every knob, and its values other than the base's. All results are exactly those of the base, except with
# `top_k`.
KNOBS: Mapping[str, tuple[str, Sequence[Any]]] = {
    "weights-applied": ("weights_applied", ("input", "output")),
    "top-k": ("top_k", (1,)),
    "pad-to-capacity": ("capacity.padded", (True,)),
    "pad-tokens": ("padding.tokens", ("group_max",)),
    "moe-permute-fusion": (EXTRA + "moe_permute_fusion", (True,)),  # Megatron-Core
}


def one_at_a_time(base: Config, knobs: Mapping[str, tuple[str, Sequence[Any]]]) -> Iterator[tuple[str, Config]]:
    """Yield the base config, then every config that differs from it in one knob, with their names.

    Values that the base has are left out.

    >>> [name for name, _ in one_at_a_time(Config(), {"k": ("top_k", (1, 2, 3)), "fused": ("extra.fused", (True,))})]
    ['base', 'k-1', 'k-3', 'fused-True']
    >>> dict(one_at_a_time(Config(), {"fused": ("extra.fused", (True,))}))["fused-True"].extra
    (('fused', True),)

    Raises:
        ValueError: a knob's option is neither one of the config nor an extra one.
    """
    yield "base", base
    for knob, (option, values) in knobs.items():
        for value in values:
            changed: dict[str, Any] = {option: value}
            if option.startswith(EXTRA):
                changed = {"extra": tuple({**dict(base.extra), option.removeprefix(EXTRA): value}.items())}
            config = base.changed(changed)
            if config != base:
                yield f"{knob}-{value}", config


def names() -> tuple[str, ...]:
    """Return the names of the workloads."""
    return tuple(_workload_name(name) for name, _ in one_at_a_time(Config(), KNOBS))


def turned(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for name, config in one_at_a_time(Config(variant=variant), KNOBS):
        changed = {option: value for option, value in config.options().items() if option != "variant"}
        recipe = Recipe(_workload_name(name), config=changed)
        workload = exchange_workload(recipe, ExchangeStep(), variant, layout)
        yield replace(workload, run=ExchangeStep(option="any"))


def _workload_name(name: str) -> str:
    return f"knob-{name.replace('_', '-').lower()}"


CHAPTERS = (Chapter((ExchangeStep(option="any"),), names(), turned, "every", (SINGLE, EP2, EP2_ETP2, EP2_EDP2)),)
