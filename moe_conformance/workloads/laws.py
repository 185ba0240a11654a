"""Changes of a run that must not change its results, for every layer. Every function returns such runs (twins)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.workload import Stride, Twist, Workload
from moe_conformance.workloads.selection import profiles
from moe_conformance.workloads.twins import Origin, Rows, Twin, rows_of, the_same, twin

Source = tuple[int, int, int]  # microbatch, rank and token

# ---- names ---------------------------------------------------------------------------------------------------------


def reordered(workload: Workload) -> list[Twin]:
    """Return a twin with the tokens of every rank, and the slots of every token, in another order."""

    def rows(m: int, rank: int) -> Rows:
        generator = draw.generator("reordered", workload.name, m, rank)
        T, K = workload.batches[m][rank].ids_TK.shape
        order_T = torch.randperm(T, generator=generator)
        slots = [torch.randperm(K, generator=generator) for _ in range(T)]
        slots_TK = torch.stack(slots) if slots else torch.empty(0, K, dtype=torch.int64)
        return rows_of([(m, rank, t) for t in order_T.tolist()], workload)._replace(slots_TK=slots_TK)

    return [twin(workload, "with tokens and slots in another order", _origin(workload, rows))]


def relabelled(workload: Workload) -> list[Twin]:
    """Return twins in which the experts have other ids, so that other ranks hold them."""
    E = workload.config.experts
    orders = {"under other numbers": torch.randperm(E, generator=draw.generator("relabelled", workload.name))}
    if workload.likened == "full":
        orders["numbered from behind"] = torch.arange(E).flip(0)
    return [
        twin(
            workload,
            f"with experts {how}",
            numbers_E=numbers_E,
            twist=Twist(probe_as=tuple(numbers_E.argsort().tolist())),
        )
        for how, numbers_E in orders.items()
    ]


# ---- inputs --------------------------------------------------------------------------------------------------------


def scaled(workload: Workload) -> list[Twin]:
    """Return a twin in which the weights of every token are multiplied by a power of two, drawn for each token."""

    def rows(m: int, rank: int) -> Rows:
        rows = the_same(workload)[m][rank]
        generator = draw.generator("scaled", workload.name, m, rank)
        return rows._replace(powers_T=torch.randint(-3, 4, (len(rows.powers_T),), generator=generator))

    how = "with all weights of a token times a power of two"
    return [twin(workload, how, _origin(workload, rows), finals=False, bits=True)]


def strided(workload: Workload) -> list[Twin]:
    """Return twins whose inputs have other strides; in the full profile with every stride, and one input alone."""
    wanted: list[dict[str, Stride]] = [
        {"x": "transposed", "upstream": "rows"},  # libraries refuse these least; ids stay as they are
        {"x": "packed", "ids": "transposed", "weights": "columns", "upstream": "transposed"},
    ]
    if workload.likened == "full":
        wanted += [
            {"x": "rows", "ids": "packed", "weights": "transposed", "upstream": "columns"},
            {"x": "columns", "ids": "rows", "weights": "rows", "upstream": "packed"},
        ]
        wanted += [{name: "transposed"} for name in ("x", "ids", "weights", "upstream")]
    made = [twin(workload, _lying(strides), twist=Twist(strides)) for strides in wanted]
    if all(len(batch.x_TD) % 2 == 0 for batch in workload.batches[0]):
        how = "with tokens (S, B, D) that lie as (B, S, D)"
        made.append(twin(workload, how, lead="two_dims", twist=Twist({"x": "swapped"})))
    return made


def expanded(workload: Workload) -> list[Twin]:
    """Return twins in which inputs that are equal for all tokens are expanded, with strides of zero."""
    wanted: list[dict[str, Stride]] = [{"ids": "expanded", "weights": "expanded", "upstream": "expanded"}]
    if workload.likened == "full":
        wanted += [{name: "expanded"} for name in ("ids", "weights", "upstream")]
    return [twin(workload, _lying(strides), twist=Twist(strides)) for strides in wanted]


def _lying(strides: dict[str, Stride]) -> str:
    words: dict[Stride, str] = {
        "rows": "every second row",
        "columns": "every second column",
        "transposed": "transposed",
        "packed": "columns of a wider matrix",
        "expanded": "there once",
        "swapped": "the second dimension first",
    }
    return "with " + ", ".join(f"{name} {words[stride]}" for name, stride in strides.items())


# ---- places --------------------------------------------------------------------------------------------------------


def spread(workload: Workload) -> list[Twin]:
    """Return twins with the tokens on other ranks: shifted by one rank, and split over the ranks of other layouts."""
    world, E = workload.layout.world, workload.config.experts
    smaller = Layout(1) if world < 4 else Layout(2, ep=2)
    layouts = (smaller,) if workload.likened == "quick" else profiles.quick_layouts()
    every = [(0, rank, t) for rank in range(world) for t in range(len(workload.batches[0][rank].x_TD))]
    turned = [[source for source in every if source[1] == (rank + 1) % world] for rank in range(world)]
    made = [twin(workload, "with the tokens of the next rank on every rank", _placed(workload, [turned]))]
    for layout in layouts:
        if layout != workload.layout and layout.world <= world and E % layout.ep == 0:
            cut = _cut(every, _shares(workload, len(every), layout.world))
            made.append(twin(workload, f"on {layout.name}", _placed(workload, [cut]), layout=layout))
    return made


def packed(workload: Workload) -> list[Twin]:
    """Return twins with the sequences of a rank, two tokens each, in another order and in several microbatches."""
    world = range(workload.layout.world)

    def sequences(rank: int) -> list[list[Source]]:
        T = len(workload.batches[0][rank].x_TD)
        starts = torch.randperm(-(-T // 2), generator=draw.generator("packed", workload.name, rank)).tolist()
        return [[(0, rank, t) for t in range(2 * start, min(2 * start + 2, T))] for start in starts]

    def packs(rank: int, first: int) -> list[list[Source]]:
        found = sequences(rank)
        return [[source for sequence in part for source in sequence] for part in (found[:first], found[first:])]

    def microbatches(first: int) -> Origin:
        by_rank = [packs(rank, first) for rank in world]
        return _placed(workload, [[by_rank[rank][m] for rank in world] for m in range(2)])

    made = [twin(workload, "in two packs of other order", microbatches(1), schedule="F0 B0 F1 B1")]
    if workload.likened == "full":
        made.append(twin(workload, "in two packs in flight", microbatches(2), schedule="F0 F1 B1 B0"))
        if all(len(batch.x_TD) % 2 == 0 for batch in workload.batches[0]):
            made.append(twin(workload, "with one row for two sequences", lead="two_dims"))
    return made


def exchanged(workload: Workload, variants: Sequence[str]) -> list[Twin]:
    """Return twins that run through another variant of the backend; in the full profile through every other one."""
    others = [variant for variant in variants if variant != workload.config.variant]
    if workload.likened == "quick":
        others = others[:1]
    return [twin(workload, f"through {variant}", variant=variant) for variant in others]


# ---- what else is there --------------------------------------------------------------------------------------------


def among_fewer(workload: Workload) -> list[Twin]:
    """Return forward-only twins with fewer tokens: one on every rank, or every other one in reverse order.

    The one token of a rank is its last one, or one that all ranks have for the same expert, so that the other experts
    are idle.
    """
    ids = [batch.ids_TK[:, 0].tolist() for batch in workload.batches[0]]
    last = [len(ids_of_rank) - 1 for ids_of_rank in ids]
    shared = sorted(set.intersection(*map(set, ids)))
    kept = {
        "with one token on every rank": [[t] for t in last],
        "with every other token, the last first": [list(range(t, -1, -2)) for t in last],
    }
    if shared:
        kept["with one token on every rank, all for one expert"] = [
            [ids_of_rank.index(shared[0])] for ids_of_rank in ids
        ]
    made = []
    for how, tokens in kept.items():
        places = [[(0, rank, t) for t in mine] for rank, mine in enumerate(tokens)]
        made.append(twin(workload, how, _placed(workload, [places]), partial=True, schedule="F0"))
    return made


# ---- what is asked for --------------------------------------------------------------------------------------------


def alone(workload: Workload) -> list[Twin]:
    """Return twins that run a single microbatch each."""
    return [
        twin(workload, f"with microbatch {m} alone", (ranks,), finals=False, partial=True, schedule="F0 B0")
        for m, ranks in enumerate(the_same(workload))
    ]


def unasked(workload: Workload) -> list[Twin]:
    """Return twins in which tokens, weights or parameters require no gradient, with deterministic algorithms."""
    wanted: list[tuple[Literal["x", "weights", "parameters"], ...]] = [("x",), ("weights",)]
    if workload.parameters:
        wanted += [("parameters",), ("x", "weights")]
    return [
        twin(
            workload,
            f"with {' and '.join(names)} that ask for no gradient",
            bits=True,
            twist=Twist(unasked=names, deterministic=True),
        )
        for names in wanted
    ]


def padding_gradients(workload: Workload) -> list[Twin]:
    """Return a twin with large gradients at all padding rows."""
    how = "with a large gradient at every padding row"
    return [twin(workload, how, bits=True, twist=Twist(padding_gradients=True))]


def under_autocast(workload: Workload) -> list[Twin]:
    """Return a twin whose forwards run under autocast to the dtype of the tokens."""
    return [twin(workload, "under autocast", twist=Twist(autocast=True))]


def with_a_graph(workload: Workload) -> list[Twin]:
    """Return a twin whose backwards run with create_graph."""
    return [twin(workload, "with create_graph", twist=Twist(create_graph=True))]


@dataclass(frozen=True)
class Nudged:
    """Twins with one input, or all parameters, moved along a random direction of norm 1, by h, -h, 2 h and -2 h."""

    what: Literal["x", "weights", "parameters"]
    h: float
    directions: Mapping[Any, Tensor]  # by rank, or by parameter
    twins: tuple[Twin, Twin, Twin, Twin]  # by h, -h, 2 h and -2 h


def nudged(workload: Workload) -> list[Nudged]:
    """Return the twins for finite differences in tokens, weights and parameters, of one microbatch."""
    fields: dict[Literal["x", "weights", "parameters"], dict[Any, Tensor]] = {
        "x": {rank: batch.x_TD for rank, batch in enumerate(workload.batches[0])},
        "weights": {rank: batch.weights_TK for rank, batch in enumerate(workload.batches[0])},
        "parameters": dict(workload.parameters),
    }
    made = []
    for what, values in fields.items():
        generator = draw.generator("nudged", workload.name, what)
        drawn = {key: torch.randn(v.shape, generator=generator, dtype=torch.float64) for key, v in values.items()}
        norm = float(sum(float(v.square().sum()) for v in drawn.values())) ** 0.5
        directions = {key: v / norm for key, v in drawn.items()}
        h = 2.0**-17 * max(1.0, *(float(v.abs().max()) for v in values.values() if v.numel()))
        steps = (h, -h, 2 * h, -2 * h)
        first, second, third, fourth = (_moved(workload, what, directions, step) for step in steps)
        made.append(Nudged(what, h, directions, (first, second, third, fourth)))
    return made


def _moved(workload: Workload, what: str, directions: Mapping[Any, Tensor], by: float) -> Twin:
    """Return the twin in which one input, or all parameters, are moved along their directions."""
    made = twin(workload, f"with {what} moved by {by:.3g}", finals=False)
    if what == "parameters":
        there = {key: value + by * directions[key] for key, value in workload.parameters.items()}
        return replace(made, workload=replace(made.workload, parameters=there))
    field = {"x": "x_TD", "weights": "weights_TK"}[what]
    ranks = tuple(
        replace(batch, **{field: getattr(batch, field) + by * directions[rank]})
        for rank, batch in enumerate(workload.batches[0])
    )
    return replace(made, workload=replace(made.workload, batches=(ranks,)))


# ---- routers -------------------------------------------------------------------------------------------------------


def shared(workload: Workload) -> list[Twin]:
    """Return a twin in which every rank has the tokens of rank 0."""
    every = [(0, 0, t) for t in range(len(workload.batches[0][0].x_TD))]
    copies = _placed(workload, [[every] * workload.layout.world])
    return [twin(workload, "with the tokens of rank 0 on every rank", copies, finals=False, partial=True)]


def recut(workload: Workload) -> list[Twin]:
    """Return a twin with tokens in another order and in two microbatches, the first of which has one token per rank."""

    def halves(rank: int) -> list[list[Source]]:
        T = len(workload.batches[0][rank].x_TD)
        order = torch.randperm(T, generator=draw.generator("recut", workload.name, rank)).tolist()
        sources = [(0, rank, t) for t in order]
        return [sources[:1], sources[1:]]

    cut = [halves(rank) for rank in range(workload.layout.world)]
    places = [[ranks[m] for ranks in cut] for m in range(2)]
    how = "with tokens in another order, the first of them alone"
    return [twin(workload, how, _placed(workload, places), schedule="F0 B0 F1 B1")]


# ---- how they are made ---------------------------------------------------------------------------------------------


def _placed(workload: Workload, places: Sequence[Sequence[Sequence[Source]]]) -> Origin:
    """Return the origin of a twin that has the given tokens, [microbatch][rank][token]."""
    return tuple(tuple(rows_of(sources, workload) for sources in ranks) for ranks in places)


def _cut(every: Sequence[Source], shares: Sequence[int]) -> list[Sequence[Source]]:
    ends = torch.tensor(shares).cumsum(0).tolist()
    return [every[end - share : end] for share, end in zip(shares, ends, strict=True)]


def _shares(workload: Workload, tokens: int, world: int) -> list[int]:
    """Return the number of tokens of every rank: equal if it is so in the workload, else none on the last rank."""
    if len({len(batch.x_TD) for batch in workload.batches[0]}) == 1 and tokens % world == 0:
        return [tokens // world] * world
    shares = [tokens // world] * world
    shares[0] += tokens % world
    if world > 1:
        shares[-1], shares[0] = 0, shares[0] + shares[-1]
    return shares


def _origin(workload: Workload, rows: Callable[[int, int], Rows]) -> Origin:
    """Return the origin of a twin from the rows of every microbatch and rank."""
    ranks = range(workload.layout.world)
    return tuple(tuple(map(partial(rows, m), ranks)) for m in range(len(workload.batches)))
