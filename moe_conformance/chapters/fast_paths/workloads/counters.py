"""Scripts that read counters of shortcuts: off at first, on during calls that may take one, and off again.

A call that is repeated has the same rows; the counts are read after every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2_EDP2, SINGLE, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import ON_COUNTED_EXPERTS
from moe_conformance.workloads.records.workload import Call, Mode, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import Profile

NAME = "shortcuts-counted"
_D, _F, _E = 16, 8, 4
_NO_GRAD: tuple[Mode, ...] = ("no_grad",)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the script for a layout."""
    del profile
    if layout in (SINGLE, EP2_EDP2):
        config = Config(variant=variant, experts=_E, hidden=_D, ffn=_F)
        parameters = _values("first")
        yield Workload(NAME, ON_COUNTED_EXPERTS, config, layout, (), calls=tuple(_calls(layout)), parameters=parameters)


def _values(seed: str) -> dict[ParameterKey, Tensor]:
    g = draw.generator(NAME, seed)
    shapes = {"gate": (_F, _D), "up": (_F, _D), "down": (_D, _F)}
    return {(name, e): torch.randn(shape, generator=g) / 4 for name, shape in shapes.items() for e in range(_E)}


def _calls(layout: Layout) -> Iterator[Call]:
    held = _E // layout.ep
    equal, other = (3,) * held, (4, *(3,) * (held - 2), 2)

    def everywhere(method: str, **given: object) -> Call:
        return Call(method, (given,) * layout.world)

    def read(*calls: Call) -> tuple[Call, ...]:
        return (everywhere("reset"), *calls, everywhere("counts"))

    change = everywhere("change", way="copy_", values=_values("second"))
    without = _forward(layout, equal, _NO_GRAD)
    unequal = _forward(layout, other, _NO_GRAD)
    trained = (_forward(layout, equal, ()), everywhere("gradients"))

    yield from (without, without, unequal, unequal, *trained, *trained, everywhere("counts"))
    yield everywhere("enable", on=True)
    yield from read()
    for calls in ((unequal,), trained, (without,), (without,)):
        yield from read(*calls)
    yield change
    yield from (*read(without), *read(without))
    yield everywhere("restrict", ranks=(0,))
    yield from read(without)
    yield everywhere("enable", on=False)
    yield from read(without)


def _forward(layout: Layout, counts: Sequence[int], modes: tuple[Mode, ...]) -> Call:
    given, upstream = [], []
    for rank in range(layout.world):
        g = draw.generator(NAME, str(counts), rank)
        given.append({"rows_RD": torch.randn(sum(counts), _D, generator=g), "counts_N": tuple(counts)})
        upstream.append({"": torch.randn(sum(counts), _D, generator=g)})
    if modes:
        return Call("forward", tuple(given), modes=modes)
    return Call("forward", tuple(given), ("rows_RD",), tuple(upstream))


CHAPTERS = (Chapter((ON_COUNTED_EXPERTS,), (NAME,), scripts, quick=(SINGLE, EP2_EDP2)),)
