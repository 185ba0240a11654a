"""Scripts for permute and related functions on one rank: rows by expert, rows by index, segments, dense maps.

All values are small whole numbers, weights have three bits: every product and sum is exact in bfloat16 too, in any
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config, Routing
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, Padded, Ref, Workload
from moe_conformance.workloads.selection.profiles import Profile

_D = 16
Ids = Callable[[int, Config, torch.Generator], Tensor]


def anywhere(T: int, config: Config, generator: torch.Generator) -> Tensor:
    """Route every token to K different experts."""
    return draw.choose(T, config, generator)


def _few(T: int, config: Config, generator: torch.Generator) -> Tensor:
    """Route to experts 1, 4 and 6 only: the first, the last and several between have no row."""
    return draw.choose(T, config, generator, (1, 4, 6))


def _to_one(T: int, config: Config, generator: torch.Generator) -> Tensor:
    return torch.full((T, config.top_k), 5)


def empty_slots(T: int, config: Config, generator: torch.Generator) -> Tensor:
    """Leave some slots empty, in any place, and all slots of token 2."""
    ids_TK = anywhere(T, config, generator)
    ids_TK[torch.rand(ids_TK.shape, generator=generator) < 0.3] = -1
    ids_TK[2] = -1
    return ids_TK


def all_empty(T: int, config: Config, generator: torch.Generator) -> Tensor:
    """Leave all slots empty."""
    return torch.full((T, config.top_k), -1)


def twice(T: int, config: Config, generator: torch.Generator) -> Tensor:
    """Give every other token one expert in two slots."""
    ids_TK = anywhere(T, config, generator)
    ids_TK[::2, 1] = ids_TK[::2, 0]
    return ids_TK


def _in_turn(T: int, config: Config, generator: torch.Generator) -> Tensor:
    """Route round robin, so that all experts have equally many rows."""
    return draw.in_turn(T, config)


@dataclass(frozen=True)
class Permute:
    """The options of one script of permute and unpermute."""

    name: str
    ids: Ids = anywhere
    tokens: int = 13
    config: Mapping[str, Any] = field(default_factory=dict)
    strided: bool = False  # x is a transposed view


_BF16 = {"dtype": torch.bfloat16}
_PERMUTE = (
    Permute("permute"),
    Permute("permute-one-token", tokens=1),
    Permute("permute-no-tokens", tokens=0),
    Permute("permute-idle-experts", _few),
    Permute("permute-all-to-one", _to_one, config={"top_k": 1}),
    Permute("permute-empty-slots", empty_slots),
    Permute("permute-all-empty", all_empty, tokens=3),
    Permute("permute-twice", twice),
    Permute("permute-equal", _in_turn, tokens=16),
    Permute("permute-many-slots", config={"top_k": 5}),
    Permute("permute-many-rows", tokens=300, config={"experts": 3}),
    Permute("permute-strided", strided=True),
    Permute("permute-bf16", config=_BF16),
    Permute("permute-to-16", config={"padding.row_multiple": 16}),
    Permute("permute-to-16-idle-experts", _few, config={"padding.row_multiple": 16}),
    Permute("permute-to-16-full", _in_turn, tokens=64, config={"padding.row_multiple": 16}),
    Permute("permute-to-16-no-tokens", tokens=0, config={"padding.row_multiple": 16}),
    Permute("permute-to-32-bf16", tokens=70, config={"padding.row_multiple": 32, **_BF16}),
    Permute("permute-to-128-empty-slots", empty_slots, tokens=300, config={"padding.row_multiple": 128, "experts": 4}),
    Permute("permute-to-3", tokens=29, config={"padding.row_multiple": 3}),
)

_FORMS: tuple[tuple[str, Ids, int, dict[str, Any]], ...] = (
    ("forms", anywhere, 13, {}),
    ("forms-empty-slots", empty_slots, 13, {}),
    ("forms-all-empty", all_empty, 3, {}),
    ("forms-no-tokens", anywhere, 0, {}),
    # Of libraries that take a weight of zero for an empty slot.
    ("forms-without-zeros", anywhere, 13, {}),
    ("forms-empty-slots-without-zeros", empty_slots, 13, {}),
    ("forms-every-expert", anywhere, 5, {"top_k": 8}),
    ("forms-many-experts", anywhere, 40, {"experts": 300, "top_k": 4}),
)

_COUNTS: tuple[tuple[str, tuple[tuple[int, ...], ...], dict[str, Any]], ...] = (
    ("reorder", ((3, 0, 2, 5), (1, 4, 0, 2), (2, 2, 3, 1)), {}),
    ("reorder-equal", ((3, 3, 3, 3), (3, 3, 3, 3)), {}),
    # All sources send equally many rows, all experts get equally many; only segments differ.
    ("reorder-equal-sums", ((1, 3), (3, 1)), {}),
    ("reorder-equal-from-the-first", ((2, 2, 2), (2, 2, 2), (2, 2, 3)), {}),
    ("reorder-one-source", ((3, 0, 2, 5),), {}),
    ("reorder-one-expert", ((3,), (0,), (4,)), {}),
    ("reorder-idle", ((0, 0, 2), (0, 0, 0), (0, 3, 1)), {}),
    ("reorder-no-rows", ((0, 0), (0, 0), (0, 0)), {}),
    ("reorder-bf16", ((2, 7, 1), (4, 0, 3)), _BF16),
)


@dataclass(frozen=True)
class _Index:
    """The index of one script, of tokens or sentinels (None)."""

    name: str
    index: tuple[int | None, ...]
    tokens: int = 6
    dtype: torch.dtype = torch.float32


_S = None  # a sentinel
_INDEX = (
    _Index("row-index", (3, _S, 0, 5, 3, _S, 1, 3)),
    _Index("row-index-sentinels-first", (_S, _S, _S, 2, 0, 5)),
    _Index("row-index-sentinels-last", (5, 0, 2, 2, _S, _S)),
    _Index("row-index-all-sentinels", (_S, _S, _S)),
    _Index("row-index-no-sentinels", (5, 4, 0, 1, 2, 3)),
    _Index("row-index-no-rows", ()),
    _Index("row-index-no-tokens", (_S, _S), tokens=0),
    _Index("row-index-bf16", (3, _S, 0, 5, 3, _S, 1, 3), dtype=torch.bfloat16),
)

NAMES = (
    *(recipe.name for recipe in _PERMUTE),
    *(name for name, *_of in _FORMS),
    *(name for name, *_of in _COUNTS),
    *(recipe.name for recipe in _INDEX),
)


def corpus(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts, on one rank."""
    del profile
    if layout != Layout(1):
        return
    for recipe in _PERMUTE:
        yield permutation(recipe, variant, layout)
    for name, ids, tokens, more in _FORMS:
        yield _forms(name, ids, tokens, Config(variant=variant).changed(more), layout)
    for name, counts, more in _COUNTS:
        yield _reordering(name, torch.tensor(counts), Config(variant=variant, hidden=_D).changed(more), layout)
    for index in _INDEX:
        yield _row_index(index, Config(variant=variant, hidden=_D, dtype=index.dtype), layout)


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return random whole numbers from -3 to 3."""
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def permutation(recipe: Permute, variant: str, layout: Layout) -> Workload:
    """Return the script that permutes, unpermutes the permuted rows and, if their number is known, other rows.

    Other rows distinguish the slots of a token; permuted rows of a token are all equal. With padding the number is not
    known; the permuted rows are then unpermuted once more, with large numbers and gradients in the padding.
    """
    config = Config(variant=variant, hidden=_D).changed(recipe.config)
    g = draw.generator(recipe.name)
    T = recipe.tokens
    ids_TK = recipe.ids(T, config, g)
    routing = Routing(ids_TK, draw.probe_weights(ids_TK, torch.float32, g), config.experts)
    if recipe.ids is twice:
        routing.weights_TK[:, 1] = routing.weights_TK[:, 0]  # which row belongs to which slot is not defined
    D = config.hidden
    x_TD = _numbers((D, T), config.dtype, g).T if recipe.strided else _numbers((T, D), config.dtype, g)
    upstream, other_upstream = ({"": _numbers((T, D), config.dtype, g)} for _ in range(2))
    asks = ("x_TD", "routing.weights_TK")
    calls = [
        Call("permute", ({"x_TD": x_TD, "routing": routing},), asks),
        Call("unpermute", ({"rows_RD": Ref(0, "rows_RD"), "handle": Ref(0, "handle")},), (), (upstream,)),
    ]
    if config.padding.row_multiple == 1 and recipe.ids is not twice:
        rows_RD = _numbers((int((ids_TK >= 0).sum()), D), config.dtype, g)
        back = {"rows_RD": rows_RD, "handle": Ref(2, "handle")}
        # If the backend padded without being configured to, these rows do not fit; another judge reports that.
        calls += [calls[0], Call("unpermute", (back,), ("rows_RD",), (other_upstream,), may_raise=True)]
    if config.padding.row_multiple > 1:
        padded = Padded(Ref(2, "rows_RD"), Ref(2, "counts_E"), tuple(_pairs(ids_TK, config.experts)))
        back = {"rows_RD": padded, "handle": Ref(2, "handle")}
        calls += [calls[0], Call("unpermute", (back,), (), (other_upstream,))]
    return Workload(recipe.name, Script("permutation"), config, layout, (), calls=tuple(calls))


def pads(workload: Workload) -> bool:
    """Return whether a permutation has to pad the rows of an expert that has any."""
    routing, M = workload.calls[0].given[0]["routing"], workload.config.padding.row_multiple
    return any(pairs % M for pairs in _pairs(routing.ids_TK, routing.experts))


def _pairs(ids_TK: Tensor, experts: int) -> list[int]:
    return torch.bincount(ids_TK[ids_TK >= 0], minlength=experts).tolist()


def _forms(name: str, ids: Ids, T: int, config: Config, layout: Layout) -> Workload:
    """Return the script that converts ids to a dense map, back, and to a dense map again, with a backward."""
    g = draw.generator(name)
    ids_TK = ids(T, config, g)
    weights_TK = draw.probe_weights(ids_TK, torch.float32, g)
    if T > 1 and "without-zeros" not in name:
        weights_TK[1, 0] = 0.0  # routed nevertheless
    upstream_TE = torch.randn(T, config.experts, generator=g)
    calls = (
        Call("to_dense", ({"routing": Routing(ids_TK, weights_TK, config.experts)},), ("routing.weights_TK",)),
        Call("to_indices", ({"weights_TE": Ref(0, "weights_TE"), "map_TE": Ref(0, "map_TE")},)),
        Call("to_dense", ({"routing": Ref(1)},), (), ({"weights_TE": upstream_TE},)),
    )
    return Workload(name, Script("routing_forms"), config, layout, (), calls=calls)


def _reordering(name: str, counts_WN: Tensor, config: Config, layout: Layout) -> Workload:
    """Return the script that reorders rows, undoes that, and reorders other rows back, with two backwards."""
    g = draw.generator(name)
    shape = int(counts_WN.sum()), _D
    there, back = ({"": torch.randn(shape, generator=g).to(config.dtype)} for _ in range(2))
    rows = [torch.randn(shape, generator=g).to(config.dtype) for _ in range(2)]
    calls = (
        Call("to_expert_major", ({"rows_RD": rows[0], "counts_WN": counts_WN},), ("rows_RD",), (there,)),
        Call("to_source_major", ({"rows_RD": Ref(0), "counts_WN": counts_WN},)),
        Call("to_source_major", ({"rows_RD": rows[1], "counts_WN": counts_WN},), ("rows_RD",), (back,)),
    )
    return Workload(name, Script("reordering"), config, layout, (), calls=calls)


def _row_index(recipe: _Index, config: Config, layout: Layout) -> Workload:
    """Return the script that gathers and scatters with -1, then with T as sentinel; NaN in rows at sentinels."""
    g = draw.generator(recipe.name)
    T, R = recipe.tokens, len(recipe.index)
    calls = []
    for sentinel in (-1, T):
        index_R = torch.tensor([sentinel if i is None else i for i in recipe.index], dtype=torch.int64)
        x_TD, rows_RD = _numbers((T, _D), config.dtype, g), _numbers((R, _D), config.dtype, g)
        weights_R = torch.randint(1, 8, (R,), generator=g) / 8
        empty_R = torch.tensor([i is None for i in recipe.index], dtype=torch.bool)
        rows_RD[empty_R], weights_R[empty_R] = torch.nan, torch.nan
        there, back = {"": _numbers((R, _D), config.dtype, g)}, {"": _numbers((T, _D), config.dtype, g)}
        calls += [
            Call("gather", ({"x_TD": x_TD, "index_R": index_R},), ("x_TD",), (there,)),
            Call(
                "scatter",
                ({"rows_RD": rows_RD, "index_R": index_R, "weights_R": weights_R, "tokens": T},),
                ("rows_RD", "weights_R"),
                (back,),
            ),
        ]
    return Workload(recipe.name, Script("row_index"), config, layout, (), calls=tuple(calls))


CHAPTERS = (
    Chapter((Script("permutation"), Script("routing_forms"), Script("reordering"), Script("row_index")), NAMES, corpus),
)
