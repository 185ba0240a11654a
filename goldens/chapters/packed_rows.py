"""Goldens of packed sequences: their lengths, rows, layer with every gradient, and shares under context parallelism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import nan

import numpy as np
import torch
from torch import Tensor

from goldens.chapter import Chapter
from goldens.small_layer import D, E, K, draw_experts, draw_tokens, expert_leaves, experts_of
from goldens.values import gradients, kept, leaf, real, whole
from reference import context_shares, packed_rows, packed_sequences

SIZES = tuple(product((1, 2, 3), (1, 2, 3), (False, True)))  # tp, cp, sequence parallel
LENGTHS: tuple[tuple[int, ...], ...] = ((5, 0, 4, 7), (), (0,), (12, 1))
MULTIPLES = (1, 4, 6)
JUDGED = ("smallest", "larger", "wrong")
# name: lengths, padded lengths, rows after the last sequence
PACKS: Mapping[str, tuple[Sequence[int], Sequence[int], int]] = {
    "pack": ((3, 0, 5, 1), (4, 0, 8, 4), 2), "tight": ((2, 3), (2, 3), 0), "gaps": ((0, 0), (0, 3), 1),
}  # fmt: skip
CONTEXTS = (1, 2, 3)  # cp
CUMULATIVE_PADDED = (0, 12, 12, 36)


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return sums of lengths right and wrong, packs with gaps, without and of gaps alone, and an order of rows."""
    found = {}
    for i, lengths in enumerate(LENGTHS):
        sums_S = packed_sequences.cumulative(packed_sequences.padded_lengths(lengths, 4))
        moved = [sums_S + by * (torch.arange(len(sums_S)) >= int(rng.integers(len(sums_S)))) for by in (4, 4, 1, -4)]
        found[f"lengths-{i}/in/claimed_NS"] = torch.stack([sums_S, *moved])
    found |= draw_experts(rng)
    for case, (own, padded, more) in PACKS.items():
        P = sum(padded) + more
        found |= draw_tokens(rng, case, sum(own))
        found[f"{case}/in/ids_PK"] = torch.from_numpy(rng.integers(-1, E - 1, size=(P, K)))
        found[f"{case}/in/weights_PK"], found[f"{case}/in/dweights_PK"] = real(rng, P, K), real(rng, P, K)
        found[f"{case}/in/rows_PD"] = real(rng, P, D)
    found["context/in/order_R"] = torch.from_numpy(rng.permutation(CUMULATIVE_PADDED[-1]))
    return found


def work_out(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return lengths and verdicts on them, packs with outputs and gradients, and the rows of every cp rank."""
    found = {**_lengths(inputs), **_context(inputs["context/in/order_R"])}
    for case in PACKS:
        found |= {**_packing(inputs, case), **_layer(inputs, case)}
    return found


def _lengths(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    multiples = [packed_sequences.length_multiple(tp=tp, cp=cp, sequence_parallel=sp) for tp, cp, sp in SIZES]
    found = {"lengths/out/multiples": whole(multiples)}
    for i, lengths in enumerate(LENGTHS):
        real_S = packed_sequences.cumulative(lengths)
        padded = [packed_sequences.padded_lengths(lengths, multiple) for multiple in MULTIPLES]
        claimed_NS = inputs[f"lengths-{i}/in/claimed_NS"]
        judged = [packed_sequences.judge_lengths(lengths, real_S, claimed_S, 4) for claimed_S in claimed_NS]
        found[f"lengths-{i}/out/cumulative_S"] = real_S
        found[f"lengths-{i}/out/padded_MS"] = whole(padded)
        found[f"lengths-{i}/out/judged_N"] = whole([JUDGED.index(word) for word in judged])
    return found


def _packed(tokens_TX: Tensor, case: str, fill: float) -> Tensor:
    """Pack the tokens of a case; the rows after the last sequence are filled as its gap is."""
    lengths, padded, more = PACKS[case]
    return packed_rows.pack(tokens_TX.split(list(lengths)), [*padded[:-1], padded[-1] + more], fill=fill)


def _packing(inputs: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """Return what `pack`, `unpack` and `route_gaps_nowhere` make of the case, and their gradients."""
    of = {name: inputs[f"{case}/in/{name}"] for name in ("ids_TK", "dy_TD", "ids_PK", "dweights_PK", "rows_PD")}
    sums = [packed_sequences.cumulative(lengths) for lengths in PACKS[case][:2]]
    real_P = packed_rows.real_rows(sums[0], sums[1], len(of["rows_PD"]))
    x_TD, rows_PD = leaf(inputs[f"{case}/in/x_TD"]), leaf(of["rows_PD"])
    x_PD, unpacked_TD = _packed(x_TD, case, 2.5), torch.cat(packed_rows.unpack(rows_PD, *sums))
    weights_PK = leaf(inputs[f"{case}/in/weights_PK"])
    routed = packed_rows.route_gaps_nowhere(of["ids_PK"], weights_PK, real_P)
    return {
        f"{case}/out/real_P": real_P.long(),
        f"{case}/out/pack.ids_PK": _packed(of["ids_TK"], case, -1),
        f"{case}/out/pack.x_PD": kept(x_PD),
        f"{case}/out/pack.dx_TD": gradients([x_PD], {"x": x_TD}, [of["rows_PD"]])["x"],
        f"{case}/out/unpack.x_TD": kept(unpacked_TD),
        f"{case}/out/unpack.drows_PD": gradients([unpacked_TD], {"rows": rows_PD}, [of["dy_TD"]])["rows"],
        f"{case}/out/routed.ids_PK": routed.ids_TK,
        f"{case}/out/routed.weights_PK": kept(routed.weights_TK),
        f"{case}/out/routed.dweights_PK": gradients([routed.weights_TK], {"w": weights_PK}, [of["dweights_PK"]])["w"],
    }


def _layer(inputs: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """Return the output of the layer on the pack, NaN in its gaps, and all gradients."""
    sums = [packed_sequences.cumulative(lengths) for lengths in PACKS[case][:2]]
    dy_PD = inputs[f"{case}/in/rows_PD"]
    real_P = packed_rows.real_rows(sums[0], sums[1], len(dy_PD))
    leaves = {name: leaf(inputs[f"{case}/in/{name}"]) for name in ("x_TD", "weights_PK")} | expert_leaves(inputs)
    x_PD, ids_PK = _packed(leaves["x_TD"], case, nan), inputs[f"{case}/in/ids_PK"]
    y_PD = packed_rows.packed_forward(x_PD, ids_PK, leaves["weights_PK"], experts_of(leaves), real_P)
    found = {f"{case}/out/layer.y_PD": kept(y_PD)}
    for name, gradient in gradients([y_PD], leaves, [dy_PD]).items():
        found[f"{case}/out/layer.d{name}"] = gradient
    return found


def _context(order_R: Tensor) -> dict[str, Tensor]:
    R, halves = len(order_R), (order_R[:7], order_R[7:])
    found = {}
    for name, held in (("halves", halves), ("twice", (order_R[:7], order_R[6:])), ("part", halves[:1])):
        found[f"context/out/{name}-are-partition"] = whole([context_shares.is_partition(held, R)])
    for cp in CONTEXTS:
        found[f"context/out/share-cp{cp}_CP"] = whole(context_shares.context_share(12, cp))
        found[f"context/out/rows-cp{cp}_CR"] = torch.stack(context_shares.context_rows(whole(CUMULATIVE_PADDED), cp))
        found[f"context/out/none-cp{cp}_CR"] = torch.stack(context_shares.context_rows(whole([0, 0]), cp))
    return found


REQUIREMENTS = ("PACK-03", "PACK-07", "PACK-08", "PACK-09", "PACK-10", "PACK-15")

CHAPTER = Chapter(2405, REQUIREMENTS, draw, work_out)
