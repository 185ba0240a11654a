"""Scripts that add rows to an output that shares memory with other tensors, in grad modes and compiled.

Output rows that no index names hold other values. Sums have few digits where bits are compared with those of an oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import SINGLE, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.memory import Laid, Relation, size
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, Mode, Root, Workload
from moe_conformance.workloads.selection.profiles import Profile

_N, _J, _D = 6, 14, 5
RELATIONS: tuple[Relation, ...] = get_args(Relation)
_MODES: tuple[tuple[Mode, ...], ...] = (
    (),
    ("no_grad",),
    ("inference_mode",),
    ("no_grad", "enable_grad"),
    ("enable_grad", "no_grad"),
    ("inference_mode", "enable_grad"),
)
_SETTINGS: tuple[tuple[Mode, ...], ...] = ((), ("deterministic, warn only",), ("deterministic",))
Given = Mapping[str, Any]


def _rows(seed: str, rows: int = _N, added: int = _J, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return out (N, D) above 0, an index of J rows with repeats but without the last row, and src (J, D)."""
    g = draw.generator(seed)
    return {
        "out_ND": (torch.rand(rows, _D, generator=g) + 0.5).to(dtype),
        "index_J": torch.randint(0, max(1, rows - 1), (added,), generator=g),
        "src_JD": torch.randn(added, _D, generator=g).to(dtype),
    }


def _related(gradients: bool) -> Iterator[Call]:
    """Yield a call for every memory relation, one with no source rows, and one without any rows."""
    shapes: list[tuple[Relation, int, int]] = [(relation, _N, _J) for relation in RELATIONS]
    for relation, rows, added in (*shapes, ("same tensor", _N, 0), ("overlapping", 0, 0)):
        drawn = _rows(f"{relation} {rows} {added}", rows, added)
        g = draw.generator(f"memory {relation}")
        memory_M = torch.randn(size(relation, (rows, _D)), generator=g)
        given: dict[str, Any] = {
            "out_ND": Laid(memory_M, relation, (rows, _D), "out"),
            "index_J": drawn["index_J"],
            "src_JD": drawn["src_JD"],
            "x_ND": Laid(memory_M, relation, (rows, _D), "x"),
        }
        upstream = ({"": torch.randn(rows, _D, generator=g)},) if gradients else ()
        modes: tuple[Mode, ...] = () if gradients else ("no_grad",)
        yield Call("add", (given,), ("src_JD",) if gradients else (), upstream, modes=modes)


def _given(kind: str, drawn: Mapping[str, Any], seed: str) -> Given:
    """Return the arguments of `add`; for `combine_add` with tokens in other memory."""
    if kind == "scatter_add":
        return drawn
    x_ND = torch.randn(_N, _D, generator=draw.generator(f"x {seed}")).to(drawn["src_JD"].dtype)
    return {**drawn, "x_ND": x_ND}


def _differentiated(kind: str) -> Iterator[Call]:
    """Yield calls with gradients: out is a leaf, or saved for the backward of its operation; one adds nothing."""
    for seed, added, root in (("leaf", _J, False), ("saved", _J, True), ("nothing added", 0, True)):
        drawn: dict[str, Any] = dict(_rows(f"{kind} {seed}", added=added))
        if root:
            drawn["out_ND"] = Root(drawn["out_ND"])
        upstream = {"": torch.randn(_N, _D, generator=draw.generator(f"upstream {kind} {seed}"))}
        yield Call("add", (_given(kind, drawn, seed),), ("out_ND", "src_JD"), (upstream,))


def _nested(kind: str) -> Iterator[Call]:
    """Yield the same call under every nesting of grad modes, with a backward if gradients are recorded."""
    given = _given(kind, _rows(f"{kind} modes"), "modes")
    upstream = ({"": torch.randn(_N, _D, generator=draw.generator(f"upstream {kind} modes"))},)
    for modes in _MODES:
        records = "inference_mode" not in modes and modes[-1:] != ("no_grad",)
        yield Call("add", (given,), ("out_ND", "src_JD"), upstream if records else (), modes=modes)


def _set(kind: str) -> Iterator[Call]:
    """Yield calls under every deterministic setting: one that succeeds, one whose rows do not fit, one without rows."""
    fitting = _given(kind, _rows(f"{kind} settings"), "settings")
    broken = {**fitting, "src_JD": torch.ones(_J, _D + 1)}
    for modes in _SETTINGS:
        yield Call("add", (fitting,), modes=modes)
        yield Call("add", (broken,), modes=modes, may_raise=True)
        yield Call("add", (_given(kind, _rows(f"{kind} settings", added=0), "settings"),), modes=modes)


def _without_data(kind: str) -> Iterator[Call]:
    """Yield calls on fake and meta tensors, with source rows and without."""
    for added in (_J, 0):
        given = _given(kind, _rows(f"{kind} no data", added=added, dtype=torch.bfloat16), "no data")
        yield Call("add", (given,), through="fake")
        yield Call("add", (given,), through="meta")


def _exported(kind: str) -> Iterator[Call]:
    """Yield a call and the same call of its exported program; for scatter-add also in place."""
    given = _given(kind, _rows(f"{kind} exported"), "exported")
    for method in ("add", "add_") if kind == "scatter_add" else ("add",):
        in_place = method == "add_"
        yield Call(method, (given,), modes=("no_grad",), may_raise=in_place)
        yield Call(method, (given,), modes=("no_grad",), may_raise=in_place, through="export")


def _compiled(kind: str) -> Iterator[Call]:
    """Yield a call and the same call compiled as one graph, with gradients and without."""
    given = _given(kind, _rows(f"{kind} compiled"), "compiled")
    upstream = ({"": torch.randn(_N, _D, generator=draw.generator(f"upstream {kind} compiled"))},)
    yield Call("add", (given,), ("out_ND", "src_JD"), upstream)
    yield Call("add", (given,), ("out_ND", "src_JD"), upstream, may_raise=True, through="compile")
    yield Call("add", (given,), modes=("no_grad",))
    yield Call("add", (given,), modes=("no_grad",), may_raise=True, through="compile")


_SCRIPTS: Mapping[str, Callable[[str], Iterator[Call]]] = {
    "relations": lambda kind: _related(gradients=False),
    "relations-gradients": lambda kind: _related(gradients=True),
    "gradients": _differentiated,
    "grad-modes": _nested,
    "deterministic-setting": _set,
    "without-data": _without_data,
    "exported": _exported,
    "compiled": _compiled,
}
_KINDS = {"combine_add": "combine-add", "scatter_add": "scatter"}
_FULL = ("exported", "compiled")  # they import a compiler


def _names(profile: Profile) -> Iterator[tuple[str, str, Callable[[str], Iterator[Call]]]]:
    """Yield the name of every script, the surface, and the function that draws its calls."""
    for kind, prefix in _KINDS.items():
        for name, calls in _SCRIPTS.items():
            if (kind == "combine_add" or "relations" not in name) and (profile == "full" or name not in _FULL):
                yield f"{prefix}-{name}", kind, calls


NAMES = tuple(name for name, _, _ in _names("full"))


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts, on one rank."""
    if layout == SINGLE:
        for name, kind, calls in _names(profile):
            yield Workload(name, Script(kind), Config(variant=variant, hidden=_D), layout, (), calls=tuple(calls(kind)))


CHAPTERS = (Chapter((Script("combine_add"), Script("scatter_add")), NAMES, scripts, quick=(SINGLE,)),)
