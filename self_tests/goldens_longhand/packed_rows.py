"""Packed sequences by hand: every row by the sequence that it belongs to, the layer without gaps."""

from __future__ import annotations

from typing import Any

import numpy as np

from goldens.chapters.packed_rows import CONTEXTS, CUMULATIVE_PADDED, JUDGED, LENGTHS, MULTIPLES, PACKS, SIZES
from self_tests.goldens_longhand.padded_layer import Given, experts_of, stacked, tokens_of
from self_tests.oracles import layer
from self_tests.oracles import packing as second

UNANSWERED: tuple[str, ...] = ()


def work_out(given: Given) -> dict[str, Any]:
    """Lengths and verdicts, packs and their layer, and shares of cp ranks."""
    found: dict[str, Any] = {
        "lengths/out/multiples": [second.divider(tp, cp, sequence_parallel=sp) for tp, cp, sp in SIZES]
    }
    for i, lengths in enumerate(LENGTHS):
        real = second.running_sums(lengths)
        claims = given[f"lengths-{i}/in/claimed_NS"].tolist()
        judged = [JUDGED.index(second.judged_lengths(lengths, real, claim, 4)) for claim in claims]
        padded = [[second.next_multiple(length, multiple) for length in lengths] for multiple in MULTIPLES]
        found[f"lengths-{i}/out/cumulative_S"] = real
        found[f"lengths-{i}/out/padded_MS"] = padded
        found[f"lengths-{i}/out/judged_N"] = judged
    for case in PACKS:
        made = {**packing(given, case), **packed_layer(given, case)}
        found |= {f"{case}/out/{name}": value for name, value in made.items()}
    return {**found, **context(given["context/in/order_R"].tolist())}


def real_rows(given: Given, case: str) -> list[bool]:
    """Which rows of the case's pack are tokens."""
    lengths, padded, _ = PACKS[case]
    return second.real_rows(
        second.running_sums(lengths), second.running_sums(padded), len(given[f"{case}/in/rows_PD"])
    )


def packing(given: Given, case: str) -> dict[str, Any]:
    """Tokens laid out, gaps filled; and rows taken up again, gaps left."""
    lengths, padded, _ = PACKS[case]
    tokens, rows_PD = tokens_of(given, case), given[f"{case}/in/rows_PD"]
    at = [row for rows in second.laid_out(lengths, padded).rows for row in rows]  # of every token
    real = real_rows(given, case)
    x_PD, ids_PK = np.full(rows_PD.shape, 2.5), np.full((len(rows_PD), tokens.ids_TK.shape[1]), -1)
    for t, row in enumerate(at):
        x_PD[row], ids_PK[row] = tokens.x_TD[t], tokens.ids_TK[t]
    whole = layer.Tokens(rows_PD, given[f"{case}/in/ids_PK"], given[f"{case}/in/weights_PK"])
    found = {"real_P": real, "pack.ids_PK": ids_PK, "pack.x_PD": x_PD}
    found["pack.dx_TD"] = found["unpack.x_TD"] = second.chosen(whole, at).x_TD
    found["unpack.drows_PD"] = second.put_back(given[f"{case}/in/dy_TD"], at, len(rows_PD))
    for name, values, nothing in (
        ("routed.ids_PK", whole.ids_TK, -1),
        ("routed.weights_PK", whole.weights_TK, 0.0),
        ("routed.dweights_PK", given[f"{case}/in/dweights_PK"], 0.0),
    ):
        found[name] = values.copy()
        for row, is_real in enumerate(real):
            if not is_real:
                found[name][row] = nothing
    return found


def packed_layer(given: Given, case: str) -> dict[str, Any]:
    """The layer of the real rows alone, put back to where they came from."""
    lengths, padded, _ = PACKS[case]
    tokens, dy_PD, real = tokens_of(given, case), given[f"{case}/in/rows_PD"], real_rows(given, case)
    at = [row for rows in second.laid_out(lengths, padded).rows for row in rows]
    x_PD = second.put_back(tokens.x_TD, at, len(dy_PD))
    packed = layer.Tokens(x_PD, given[f"{case}/in/ids_PK"], given[f"{case}/in/weights_PK"])
    dx_PD, dweights_PK, d_experts = second.backward(packed, real, experts_of(given), dy_PD)
    return {
        "layer.y_PD": second.forward(packed, real, experts_of(given)),
        "layer.dx_TD": second.chosen(layer.Tokens(dx_PD, packed.ids_TK, dweights_PK), at).x_TD,
        "layer.dweights_PK": dweights_PK,
        **{f"layer.{name}": gradient for name, gradient in stacked(d_experts).items()},
    }


def context(order: list[int]) -> dict[str, Any]:
    """Which cp rank holds which row, and what is a partition."""
    R = len(order)
    found: dict[str, Any] = {
        "context/out/halves-are-partition": [second.each_row_once([order[:7], order[7:]], R)],
        "context/out/twice-are-partition": [second.each_row_once([order[:7], order[6:]], R)],
        "context/out/part-are-partition": [second.each_row_once([order[:7]], R)],
    }
    for cp in CONTEXTS:
        found[f"context/out/share-cp{cp}_CP"] = second.places_by_cp_rank(12, cp)
        found[f"context/out/rows-cp{cp}_CR"] = second.rows_by_cp_rank(CUMULATIVE_PADDED, cp)
        found[f"context/out/none-cp{cp}_CR"] = np.array(second.rows_by_cp_rank([0, 0], cp)).reshape(cp, 0)
    return found
