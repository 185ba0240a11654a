"""Scripts of padded token counts, of bounds that some T exceeds, and of packed sequences with padding between them.

T tokens of a rank, P rows that it is padded to, A the alignment, B the bound. L_i tokens of sequence i in P_i rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any, Literal

import torch
from torch import Tensor

from moe_conformance.contract import Config, Padding, Routing, RoutingOptions
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import ON_EXCHANGE, Script
from moe_conformance.workloads.records.workload import Batch, Call, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

ALIGNMENTS = (1, 16, 64, 128)
BOUND = 23

# T by call; rank r has entry r modulo the length. The largest T is on one rank, on another, is aligned, is zero.
_COUNTED = ((5, 0, 70, 3), (64, 64, 64, 64), (0,), (0, 1, 0, 0), (65, 64, 3, 129), (17, 70), (0, 2, 16, 0, 128))
_BOUNDED = ((5, 0, 23, 3), (23,), (0,), (0, 1, 0, 0))
# Within the bound, exceeded by one rank, by another, by all, and within it again.
_BREACHES = ((5, 0, 23, 3), (5, 29, 0, 3), (37, 0, 1, 23), (24, 25, 26, 27), (23, 1, 0, 7))


def _by_rank(tokens: tuple[int, ...], layout: Layout) -> list[int]:
    return [tokens[rank % len(tokens)] for rank in range(layout.world)]


def _counts(name: str, config: Config, layout: Layout, counted: tuple[tuple[int, ...], ...]) -> Workload:
    calls = tuple(Call("count", tuple({"tokens": T} for T in _by_rank(tokens, layout))) for tokens in counted)
    return Workload(name, Script("token_padding"), config, layout, (), calls=calls)


def _breaches(config: Config, layout: Layout) -> Workload:
    def batch(call: int, rank: int, T: int) -> Batch:
        generator = draw.generator("bound-broken", layout.name, call, rank)
        return draw.probe_batch(rank, call, draw.choose(T, config, generator), config, generator)

    batches = tuple(
        tuple(batch(n, r, T) for r, T in enumerate(_by_rank(tokens, layout))) for n, tokens in enumerate(_BREACHES)
    )
    calls = tuple(Call("step", tuple(map(partial(_given, config), ranks)), may_raise=True) for ranks in batches)
    return Workload("bound-broken", ON_EXCHANGE, config, layout, batches, calls=calls)


def _given(config: Config, batch: Batch) -> dict[str, Any]:
    return {"x": batch.x_TD, "routing": Routing(batch.ids_TK, batch.weights_TK, config.experts)}


def token_counts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the scripts of `TOKEN_COUNTS` for a variant on a layout."""
    E = Config.experts if Config.experts % layout.ep == 0 else 3 * layout.ep
    for A in ALIGNMENTS:
        config = Config(variant, experts=E, padding=Padding(tokens="group_max", alignment=A))
        yield _counts(f"padded-counts-{A}", config, layout, _COUNTED)
    bounded = Config(variant, experts=E, padding=Padding(tokens="bound", alignment=8, bound=BOUND))
    yield _counts("padded-counts-bound", bounded, layout, _BOUNDED)
    yield _counts("padded-counts-aligned-bound", bounded.changed({"padding.bound": 24}), layout, _BOUNDED)
    yield _counts("padded-counts-bare-bound", bounded.changed({"padding.alignment": 1}), layout, _BOUNDED)
    yield _breaches(bounded, layout)


_BOUNDS = ("padded-counts-bound", "padded-counts-aligned-bound", "padded-counts-bare-bound", "bound-broken")
TOKEN_COUNTS = (*(f"padded-counts-{A}" for A in ALIGNMENTS), *_BOUNDS)

# ---- packed sequences ----------------------------------------------------------------------------------------------

PARALLEL = tuple(product((1, 2, 3, 4), (1, 2, 3), (False, True)))  # cp, tp, sequence parallel
LENGTHS = (
    *((5, 0, 4, 1, 13), (7,), (24, 48), (1, 1, 1), (0, 0), (), (17, 3, 0, 29, 2, 0)),
    (5, 13),
    (13, 5),  # the same number of tokens in the same number of sequences
    (40_000, 0, 30_001),  # sums beyond 16 bits, signed or not
)
# Pairs of lists: the second is the first with sequences of length zero at the front, in the middle and at the end.
WITH_EMPTY = (((5, 13), (0, 5, 13)), ((5, 13), (5, 0, 0, 13)), ((5, 13, 1), (5, 13, 1, 0)), ((7,), (0, 7, 0)))
ALIKE = ((7,), (5, 5, 5), (24, 24), (1, 1, 1, 1))  # a batch of one length
FLAT = tuple(lengths for lengths in LENGTHS if lengths)  # for packs with cp = 1 and no sequence parallelism
# cp, then (L_i, P_i) of every sequence: without padding, padded, and padded more than cp needs. Short sequences leave
# only padding on some ranks.
PACKS = (
    (1, ((5, 5), (0, 0), (3, 4))),
    (2, ((5, 8), (4, 4), (0, 0), (13, 16))),
    (2, ((1, 4), (0, 8), (8, 8))),
    (2, ((3, 4), (13, 16), (8, 8), (0, 0))),  # as many rows as another pack
    (3, ((2, 6), (29, 36), (0, 0), (6, 12))),
    (4, ((1, 8), (16, 16), (3, 24))),
)


LENGTHS_OF_PACKS, EMPTY_SEQUENCES = "lengths of packs", "pairs of packs without and with empty sequences"


def _sums(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _packs(layout: Layout, variant: str) -> Iterator[Workload]:
    def script(name: str, calls: Iterable[Call], *shows: str) -> Workload:
        config = Config(variant)
        return Workload(name, Script("packing"), config, layout, (), calls=tuple(calls), shows=frozenset(shows))

    def lay_out(lengths: tuple[int, ...], cp: int, tp: int, split: bool) -> Call:
        given = {"lengths": lengths, "cp": cp, "tp": tp, "sequence_parallel": split}
        return Call("lay_out", (given,) * layout.world, may_raise=True)

    with_empty = [item for pair in WITH_EMPTY for item in pair]
    yield script("packed-lengths", (lay_out(item, *axes) for axes in PARALLEL for item in LENGTHS), LENGTHS_OF_PACKS)
    yield script("packed-alike", (lay_out(item, *axes) for axes in PARALLEL for item in ALIKE), LENGTHS_OF_PACKS)
    yield script("packed-alike-empty", (lay_out((0, 0), *axes) for axes in PARALLEL), LENGTHS_OF_PACKS)
    yield script("packed-flat", (lay_out(item, 1, tp, False) for tp in (1, 2) for item in FLAT), LENGTHS_OF_PACKS)
    yield script("packed-flat-empty", (lay_out(item, 1, 1, False) for item in with_empty), EMPTY_SEQUENCES)
    yield script("packed-empty", (lay_out(item, *axes) for axes in PARALLEL for item in with_empty), EMPTY_SEQUENCES)
    sums = [(cp, _sums([L for L, _ in pack]), _sums([P for _, P in pack])) for cp, pack in PACKS]
    given = [{"cu_seqlens": real, "cu_seqlens_padded": padded} for _, real, padded in sums]
    yield script("packed-tokens", (Call("tokens", (item,) * layout.world, may_raise=True) for item in given))
    shares = [{"cu_seqlens_padded": padded, "cp": cp, "cp_rank": c} for cp, _, padded in sums for c in range(cp)]
    yield script("packed-shares", (Call("share", (item,) * layout.world, may_raise=True) for item in shares))


def _masked(
    layout: Layout,
    variant: str,
    name: str,
    sequences: int,
    balance: bool = True,
    score: Literal["sigmoid", "softmax"] = "sigmoid",
    columns: int = 1,
    learns: bool = False,
) -> Workload:
    """Return the script of a router with a padding mask: calls in pairs that differ only in the padding tokens.

    With one sequence T equals E, so that a mask applied to experts raises no error. The pairs have different masks: for
    sequences of some lengths, of others, then only padding, and none; on several ranks also only padding on every
    second rank. No two of up to seven ranks have the same mask if it has tokens and padding. With `learns` the weights
    of tokens have upstream gradients.
    """
    config = Config(variant, routing=RoutingOptions(score=score, normalise=True, balance_bias=balance))
    generator = draw.generator(name, layout.name)

    def given(lengths: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        mask_T = torch.cat([torch.arange(8) >= length for length in lengths])  # for sequences in 8 rows each
        x_TD, other_TD = (draw.route_batch(len(mask_T), config, generator, 1.0).x_TD for _ in range(2))
        other_TD = torch.where(mask_T[:, None], other_TD, x_TD)
        if columns > 1:
            x_TD, other_TD = (tensor.reshape(-1, columns, tensor.shape[1]) for tensor in (x_TD, other_TD))
        return {"x": x_TD, "padding_mask_T": mask_T}, {"x": other_TD, "padding_mask_T": mask_T}

    def both(lengths: Sequence[Tensor]) -> Iterator[Call]:
        ranks = [given(entry) for entry in lengths]
        upstream = tuple({"routing.weights_TK": upstream_of(first["padding_mask_T"])} for first, _ in ranks)
        for entry in zip(*ranks, strict=True):
            yield Call("__call__", entry, ("x",), upstream) if learns else Call("__call__", entry)

    def upstream_of(padding_T: Tensor) -> Tensor:
        drawn_TK = torch.randn(len(padding_T), config.top_k, generator=generator)
        return drawn_TK.masked_fill(padding_T[:, None], 0.0)

    def apart(lengths: Tensor) -> list[Tensor]:
        return [(lengths - 1 + rank) % 7 + 1 for rank in range(layout.world)]

    some_S = torch.randint(1, 8, (sequences,), generator=generator)
    first = tuple(both(apart(some_S)))
    parameters = draw.router_parameters(config, generator, bias=-0.9, twins=False)
    others_S = (some_S + torch.randint(0, 6, (sequences,), generator=generator)) % 7 + 1
    gaps_S, full_S = torch.zeros_like(some_S), torch.full_like(some_S, 8)
    lengths_of_others = [apart(others_S), [gaps_S] * layout.world, [full_S] * layout.world]
    if layout.world > 1:
        lengths_of_others.append([(full_S, gaps_S)[rank % 2] for rank in range(layout.world)])
    calls = first + tuple(call for lengths in lengths_of_others for call in both(lengths))
    return Workload(name, Script("masked_router"), config, layout, (), parameters=parameters, calls=calls)


SEQUENCES = (
    *("packed-lengths", "packed-alike", "packed-alike-empty", "packed-flat", "packed-empty", "packed-flat-empty"),
    *("packed-tokens", "packed-shares"),
    *("masked-router", "masked-router-square", "masked-unbalanced"),
    *("masked-two-dims", "masked-learns", "masked-softmax-learns"),
)


def sequences(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the scripts of `SEQUENCES`; those of packs on one rank only, as nothing is exchanged."""
    if layout.world == 1:
        yield from _packs(layout, variant)
    if layout.world <= USUAL_RANKS:
        yield _masked(layout, variant, "masked-router", sequences=3)
        yield _masked(layout, variant, "masked-router-square", sequences=1)
        yield _masked(layout, variant, "masked-unbalanced", sequences=3, balance=False)
        yield _masked(layout, variant, "masked-two-dims", sequences=3, balance=False, columns=2)
        yield _masked(
            layout, variant, "masked-softmax-learns", sequences=3, balance=False, score="softmax", learns=True
        )
        yield _masked(layout, variant, "masked-learns", sequences=3, balance=False, learns=True)


CHAPTERS = (
    Chapter(
        (Script("token_padding"), ON_EXCHANGE),
        TOKEN_COUNTS,
        token_counts,
        "every",
        (SINGLE, EP2, EP2_ETP2, TP2_EP2),
    ),
    Chapter((Script("packing"), Script("masked_router")), SEQUENCES, sequences),
)
