"""One knob at a time: configurations that differ from a base in exactly one field, and a batch for each of them.

Where weights are applied, how rows are permuted, and what is filled up are separate dimensions. A fault that shows with
one of these and not with the base lies in that knob.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from moe_conformance.contract import Config
from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus.chapter import EP2, EP2_EDP2, EP2_ETP2, SINGLE, Chapter
from moe_conformance.workloads.corpus.recipes import Recipe, exchange_workload
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile

EXTRA = "extra."  # begins the name of a knob that only some backends know: it goes into `Config.extra`

# Of every knob, the values other than the base's. All results are those of the base, exactly, but for `top_k`.
KNOBS: Mapping[str, Sequence[Any]] = {
    "weights_applied": ("input", "output"),
    "top_k": (1,),
    "pad_to_capacity": (True,),
    "pad_tokens": ("group_max",),
    EXTRA + "moe_permute_fusion": (True,),  # Megatron-Core
}


def one_at_a_time(base: Config, knobs: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, Config]]:
    """Yield the base, and then every configuration that differs from it in one knob, each with a name.

    A value that the base has already is left out.

    >>> [name for name, _ in one_at_a_time(Config(), {"top_k": (1, 2, 3), "extra.fused": (True,)})]
    ['base', 'top_k-1', 'top_k-3', 'fused-True']
    >>> dict(one_at_a_time(Config(), {"extra.fused": (True,)}))["fused-True"].extra
    (('fused', True),)

    Raises:
        ValueError: a knob is no field of the configuration, and no extra one.
    """
    known = {field.name for field in fields(Config)}
    yield "base", base
    for knob, values in knobs.items():
        name = knob.removeprefix(EXTRA)
        if name == knob and knob not in known:
            raise ValueError(f"{knob!r} is no field of Config; a knob of one backend begins with {EXTRA!r}")
        for value in values:
            changed: dict[str, Any] = {knob: value}
            if name != knob:
                changed = {"extra": tuple({**dict(base.extra), name: value}.items())}
            config = replace(base, **changed)
            if config != base:
                yield f"{name}-{value}", config


def names() -> tuple[str, ...]:
    """Return the names of the workloads."""
    return tuple(_workload_name(name) for name, _ in one_at_a_time(Config(), KNOBS))


def turned(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout."""
    for name, config in one_at_a_time(Config(variant=variant), KNOBS):
        changed = {field.name: getattr(config, field.name) for field in fields(Config) if field.name != "variant"}
        recipe = Recipe(_workload_name(name), config=changed)
        workload = exchange_workload(recipe, "probe", variant, layout)
        yield replace(workload, kind="knob")


def _workload_name(name: str) -> str:
    return f"knob-{name.replace('_', '-').lower()}"


CHAPTERS = (Chapter(("knob",), names(), turned, "every", (SINGLE, EP2, EP2_ETP2, EP2_EDP2)),)
