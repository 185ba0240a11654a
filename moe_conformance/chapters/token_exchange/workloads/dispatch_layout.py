"""Scripts for dispatch layouts, and for whether a process group lies within one transport domain.

They run on one rank: the owners of experts and the nodes of ranks are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, Workload
from moe_conformance.workloads.selection.profiles import Profile

Owners = Callable[[int, int], list[int]]  # (E, W) -> the rank of every expert


def _blocks(experts: int, ranks: int) -> list[int]:
    return [expert * ranks // experts for expert in range(experts)]


def _in_turn(experts: int, ranks: int) -> list[int]:
    return [expert % ranks for expert in range(experts)]


def _some_idle(experts: int, ranks: int) -> list[int]:
    """Return the owners if all experts are on rank 1 and the last rank."""
    return [1 if expert < experts // 2 else ranks - 1 for expert in range(experts)]


@dataclass(frozen=True)
class _Recipe:
    """The sizes of one script: T tokens with K slots, E experts on the ranks of nodes of the given sizes."""

    name: str
    nodes: tuple[int, ...] = (4, 4)
    experts: int = 16
    top_k: int = 3
    tokens: int = 21
    owners: Owners = _blocks
    empty: float = 0.0  # share of empty slots
    twice: bool = False
    scattered: bool = False  # the ranks of a node are not consecutive


_RECIPES = (
    _Recipe("layout"),
    _Recipe("layout-one-node", (8,)),
    _Recipe("layout-one-rank", (1,)),
    _Recipe("layout-unequal-nodes", (3, 1, 4)),
    _Recipe("layout-scattered-nodes", (4, 4), scattered=True),
    _Recipe("layout-in-turn", owners=_in_turn),
    _Recipe("layout-idle-ranks", owners=_some_idle),
    _Recipe("layout-empty-slots", empty=0.4),
    _Recipe("layout-all-empty", empty=1.0, tokens=4),
    _Recipe("layout-twice", twice=True),
    _Recipe("layout-no-tokens", tokens=0),
    _Recipe("layout-every-expert", top_k=16, tokens=5),
    _Recipe("layout-64-ranks", (8,) * 8, experts=128, top_k=8),
    _Recipe("layout-256-ranks", (8,) * 32, experts=512, top_k=8, tokens=40),
    _Recipe("layout-many-tokens", tokens=300, experts=8),
)

_EIGHT = tuple("a" * 8 + "b" * 8)  # two hosts of 8 ranks
_UNEQUAL = tuple("a" * 3 + "b" * 5 + "c" * 2)
# For every table of domains: groups, and the number of devices that their processes see.
_TRANSPORTS: tuple[tuple[str, tuple[str, ...], tuple[tuple[tuple[int, ...], int], ...]], ...] = (
    (
        "transport-two-hosts",
        _EIGHT,
        (
            ((0, 8), 8),  # two ranks, on two hosts
            ((0, 1), 1),  # one host, each process sees one device
            (tuple(range(8)), 8),
            (tuple(range(8, 16)), 1),
            (tuple(range(0, 16, 2)), 8),  # strided: as many ranks as a host has, on both hosts
            (tuple(range(0, 8, 2)), 4),
            ((7, 8), 8),  # neighbours
            ((8, 15), 2),
            (tuple(range(16)), 16),
            ((11,), 1),
        ),
    ),
    (
        "transport-unequal-hosts",
        _UNEQUAL,
        (((2, 3), 8), ((3, 7), 1), ((0, 1, 2), 2), ((4, 5, 6, 7), 5), ((8, 9), 1), ((7, 8), 2), ((0, 3, 8), 8)),
    ),
    ("transport-one-domain", ("rack",) * 16, ((tuple(range(16)), 8), ((0, 8), 1), ((0,), 1), ((3, 12), 8))),
    (
        "transport-scattered",
        tuple("ab" * 4),
        (
            ((0, 2), 8),
            ((0, 1), 8),
            ((0, 1, 2), 1),
            ((1, 2, 4, 7), 4),
            ((1, 3, 5, 7), 1),
            (tuple(range(8)), 8),
        ),
    ),
)

NAMES = (*(recipe.name for recipe in _RECIPES), *(name for name, *_of in _TRANSPORTS))


def corpus(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts, on one rank."""
    del profile
    if layout != Layout(1):
        return
    for recipe in _RECIPES:
        yield _layout(recipe, variant, layout)
    for name, domains, groups in _TRANSPORTS:
        calls = tuple(
            Call("is_local", ({"members": members, "domain_of": domains, "visible_devices": devices},))
            for members, devices in groups
        )
        yield Workload(name, Script("transport"), Config(variant=variant), layout, (), calls=calls)


def _layout(recipe: _Recipe, variant: str, layout: Layout) -> Workload:
    config = Config(variant=variant, experts=recipe.experts, top_k=recipe.top_k)
    g = draw.generator(recipe.name)
    ids_TK = draw.choose(recipe.tokens, config, g)
    ids_TK[torch.rand(ids_TK.shape, generator=g) < recipe.empty] = -1
    if recipe.twice:
        ids_TK[::2, 1] = ids_TK[::2, 0]
    node_of_W = torch.arange(len(recipe.nodes)).repeat_interleave(torch.tensor(recipe.nodes))
    if recipe.scattered:
        node_of_W = node_of_W.reshape(len(recipe.nodes), -1).T.reshape(-1)
    owner_E: Tensor = torch.tensor(recipe.owners(recipe.experts, len(node_of_W)))
    given = {"ids_TK": ids_TK, "owner_E": owner_E, "node_of_W": node_of_W}
    return Workload(recipe.name, Script("dispatch_layout"), config, layout, (), calls=(Call("__call__", (given,)),))


CHAPTERS = (Chapter((Script("dispatch_layout"), Script("transport")), NAMES, corpus),)
