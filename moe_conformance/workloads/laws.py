"""Laws that hold of every layer: what may be done to a run without changing what it gives."""

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
    """Put the tokens of every rank and the slots of every token into another order."""

    def rows(m: int, rank: int) -> Rows:
        generator = draw.generator("reordered", workload.name, m, rank)
        T, K = workload.batches[m][rank].ids_TK.shape
        order_T = torch.randperm(T, generator=generator)
        slots = [torch.randperm(K, generator=generator) for _ in range(T)]
        slots_TK = torch.stack(slots) if slots else torch.empty(0, K, dtype=torch.int64)
        return rows_of([(m, rank, t) for t in order_T.tolist()], workload)._replace(slots_TK=slots_TK)

    return [twin(workload, "with tokens and slots in another order", _origin(workload, rows))]


def relabelled(workload: Workload) -> list[Twin]:
    """Give the experts other numbers, so that other ranks hold them."""
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
    """Multiply the weights of every token by a power of two of its own."""

    def rows(m: int, rank: int) -> Rows:
        rows = the_same(workload)[m][rank]
        generator = draw.generator("scaled", workload.name, m, rank)
        return rows._replace(powers_T=torch.randint(-3, 4, (len(rows.powers_T),), generator=generator))

    how = "with all weights of a token times a power of two"
    return [twin(workload, how, _origin(workload, rows), finals=False, bits=True)]


def strided(workload: Workload) -> list[Twin]:
    """Lay the inputs into memory with gaps: tokens and upstream, then all; and in full in every way and alone."""
    asked: list[dict[str, Stride]] = [
        {"x": "transposed", "upstream": "rows"},  # what libraries refuse least: not told apart from ids otherwise
        {"x": "packed", "ids": "transposed", "weights": "columns", "upstream": "transposed"},
    ]
    if workload.likened == "full":
        asked += [
            {"x": "rows", "ids": "packed", "weights": "transposed", "upstream": "columns"},
            {"x": "columns", "ids": "rows", "weights": "rows", "upstream": "packed"},
        ]
        asked += [{each: "transposed"} for each in ("x", "ids", "weights", "upstream")]
    made = [twin(workload, _lying(strides), twist=Twist(strides)) for strides in asked]
    if all(len(batch.x_TD) % 2 == 0 for batch in workload.batches[0]):
        how = "with tokens (S, B, D) that lie as (B, S, D)"
        made.append(twin(workload, how, lead="two_dims", twist=Twist({"x": "swapped"})))
    return made


def expanded(workload: Workload) -> list[Twin]:
    """Keep what is the same for all tokens once, with a stride of zero."""
    asked: list[dict[str, Stride]] = [{"ids": "expanded", "weights": "expanded", "upstream": "expanded"}]
    if workload.likened == "full":
        asked += [{each: "expanded"} for each in ("ids", "weights", "upstream")]
    return [twin(workload, _lying(strides), twist=Twist(strides)) for strides in asked]


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
    """Give the ranks each other's tokens, and cut the same tokens up for other numbers of ranks and other layouts."""
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
    """Put the sequences of a rank, two tokens each, into another order and into several microbatches."""
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
    """Send the tokens through another exchange: in full through each that there is."""
    others = [variant for variant in variants if variant != workload.config.variant]
    if workload.likened == "quick":
        others = others[:1]
    return [twin(workload, f"through {variant}", variant=variant) for variant in others]


# ---- what else is there --------------------------------------------------------------------------------------------


def among_fewer(workload: Workload) -> list[Twin]:
    """Leave every rank its last token; or one for the same expert on all, so that the other experts are idle.

    Or every other token, the last first. Answers alone: nothing goes back.
    """
    ids = [batch.ids_TK[:, 0].tolist() for batch in workload.batches[0]]
    last = [len(each) - 1 for each in ids]
    shared = sorted(set.intersection(*map(set, ids)))
    kept = {
        "with one token on every rank": [[t] for t in last],
        "with every other token, the last first": [list(range(t, -1, -2)) for t in last],
    }
    if shared:
        kept["with one token on every rank, all for one expert"] = [[each.index(shared[0])] for each in ids]
    made = []
    for how, tokens in kept.items():
        places = [[(0, rank, t) for t in own] for rank, own in enumerate(tokens)]
        made.append(twin(workload, how, _placed(workload, [places]), partial=True, schedule="F0"))
    return made


# ---- what is asked for --------------------------------------------------------------------------------------------


def alone(workload: Workload) -> list[Twin]:
    """Run every microbatch alone."""
    return [
        twin(workload, f"with microbatch {m} alone", (ranks,), finals=False, partial=True, schedule="F0 B0")
        for m, ranks in enumerate(the_same(workload))
    ]


def unasked(workload: Workload) -> list[Twin]:
    """Ask for no gradient of the tokens, of the weights, of the experts, with deterministic algorithms."""
    asked: list[tuple[Literal["x", "weights", "parameters"], ...]] = [("x",), ("weights",)]
    if workload.parameters:
        asked += [("parameters",), ("x", "weights")]
    return [
        twin(
            workload,
            f"with {' and '.join(names)} that ask for no gradient",
            bits=True,
            twist=Twist(unasked=names, deterministic=True),
        )
        for names in asked
    ]


def padding_gradients(workload: Workload) -> list[Twin]:
    """Put large gradients at all padding rows."""
    how = "with a large gradient at every padding row"
    return [twin(workload, how, bits=True, twist=Twist(padding_gradients=True))]


def under_autocast(workload: Workload) -> list[Twin]:
    """Run the forward under autocast to the dtype that the tokens have."""
    return [twin(workload, "under autocast", twist=Twist(autocast=True))]


def with_a_graph(workload: Workload) -> list[Twin]:
    """Have every backward keep a graph of itself."""
    return [twin(workload, "with create_graph", twist=Twist(create_graph=True))]


@dataclass(frozen=True)
class Nudged:
    """One input or all parameters moved along a random direction of norm 1, by h and 2 h, to and fro."""

    what: Literal["x", "weights", "parameters"]
    h: float
    directions: Mapping[Any, Tensor]  # by rank, or by parameter
    twins: tuple[Twin, Twin, Twin, Twin]  # by h, -h, 2 h and -2 h


def nudged(workload: Workload) -> list[Nudged]:
    """Move tokens, weights and parameters, each alone; one microbatch."""
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
    """Return the twin in which one thing lies elsewhere."""
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
    """Give every rank the tokens of rank 0."""
    every = [(0, 0, t) for t in range(len(workload.batches[0][0].x_TD))]
    copies = _placed(workload, [[every] * workload.layout.world])
    return [twin(workload, "with the tokens of rank 0 on every rank", copies, finals=False, partial=True)]


def recut(workload: Workload) -> list[Twin]:
    """Put the tokens of every rank into another order and two microbatches, and route the first of them alone."""

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
    """Return the origin of given tokens, [microbatch][rank][token]."""
    return tuple(tuple(rows_of(sources, workload) for sources in ranks) for ranks in places)


def _cut(every: Sequence[Source], shares: Sequence[int]) -> list[Sequence[Source]]:
    ends = torch.tensor(shares).cumsum(0).tolist()
    return [every[end - share : end] for share, end in zip(shares, ends, strict=True)]


def _shares(workload: Workload, tokens: int, world: int) -> list[int]:
    """Return how many tokens every rank gets: equally many where all had equally many, one of them none elsewhere."""
    if len({len(batch.x_TD) for batch in workload.batches[0]}) == 1 and tokens % world == 0:
        return [tokens // world] * world
    shares = [tokens // world] * world
    shares[0] += tokens % world
    if world > 1:
        shares[-1], shares[0] = 0, shares[0] + shares[-1]
    return shares


def _origin(workload: Workload, rows: Callable[[int, int], Rows]) -> Origin:
    """Return an origin in which every rank has its own tokens, in some way."""
    ranks = range(workload.layout.world)
    return tuple(tuple(map(partial(rows, m), ranks)) for m in range(len(workload.batches)))
