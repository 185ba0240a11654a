"""The goldens of packed sequences are what the longhand makes of the stored inputs, row by row and without gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from goldens.chapters.packed_rows import CONTEXTS, CUMULATIVE_PADDED, JUDGED, LENGTHS, MULTIPLES, PACKS, SIZES
from self_tests.golden_layer import experts_of, stacked, tokens_of
from self_tests.golden_twins import assert_twins, given, stored, told
from self_tests.oracles import layer, packing
from self_tests.oracles.experts import SwiGLU


def of_lengths(lengths: Sequence[int], claims: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Sums, padded lengths, and what is said of claimed ones."""
    real = packing.running_sums(lengths)
    return {
        "cumulative_S": real,
        "padded_MS": [[packing.next_multiple(length, multiple) for length in lengths] for multiple in MULTIPLES],
        "judged_N": [JUDGED.index(packing.judged_lengths(lengths, real, claim, 4)) for claim in claims],
    }


def rows_of(case: str) -> tuple[list[int], list[bool]]:
    """Row of every token of a pack, and for every row whether it is one's."""
    lengths, padded, more = PACKS[case]
    real = packing.real_rows(packing.running_sums(lengths), packing.running_sums(padded), sum(padded) + more)
    return [row for rows in packing.laid_out(lengths, padded).rows for row in rows], real


def filled(values_TX: Any, at: Sequence[int], rows: int, fill: float) -> Any:
    """Values put to their rows, all others filled."""
    made = np.full((rows, values_TX.shape[1]), fill, dtype=values_TX.dtype)
    for t, row in enumerate(at):
        made[row] = values_TX[t]
    return made


def of_packing(own: Mapping[str, Any], case: str) -> dict[str, Any]:
    """Tokens laid out, gaps filled; rows taken up again, gaps left; gaps routed nowhere."""
    (at, real), P = rows_of(case), len(own["rows_PD"])
    here = [row for row, is_real in enumerate(real) if is_real]
    picked = {name: [own[name][row] for row in here] for name in ("ids_PK", "weights_PK", "dweights_PK")}
    as_rows = {name: np.array(rows, own[name].dtype).reshape(-1, own[name].shape[1]) for name, rows in picked.items()}
    taken_TD = np.array([own["rows_PD"][row] for row in at]).reshape(-1, own["rows_PD"].shape[1])
    return {
        "real_P": real,
        "pack.ids_PK": filled(own["ids_TK"], at, P, -1),
        "pack.x_PD": filled(own["x_TD"], at, P, 2.5),
        "pack.dx_TD": taken_TD,
        "unpack.x_TD": taken_TD,
        "unpack.drows_PD": packing.put_back(own["dy_TD"], at, P),
        "routed.ids_PK": filled(as_rows["ids_PK"], here, P, -1),
        "routed.weights_PK": filled(as_rows["weights_PK"], here, P, 0.0),
        "routed.dweights_PK": filled(as_rows["dweights_PK"], here, P, 0.0),
    }


def of_layer(own: Mapping[str, Any], experts: Sequence[SwiGLU], case: str) -> dict[str, Any]:
    """The layer of the real rows alone, put back to where they came from."""
    (at, real), P = rows_of(case), len(own["rows_PD"])
    x_PD = packing.put_back(tokens_of(own).x_TD, at, P)
    packed = layer.Tokens(x_PD, own["ids_PK"], own["weights_PK"])
    dx_PD, dweights_PK, d_experts = packing.backward(packed, real, experts, own["rows_PD"])
    answers = {"y_PD": packing.forward(packed, real, experts), "dweights_PK": dweights_PK, **stacked(d_experts)}
    answers["dx_TD"] = packing.chosen(layer.Tokens(dx_PD, packed.ids_TK, dweights_PK), at).x_TD
    return {f"layer.{name}": value for name, value in answers.items()}


def of_context(order: Sequence[int]) -> dict[str, Any]:
    """Which cp rank holds which row, and what is a partition."""
    splits = ([order[:7], order[7:]], [order[:7], order[6:]], [order[:7]])
    found: dict[str, Any] = {
        "halves-twice-part-are-partitions": [packing.each_row_once(split, len(order)) for split in splits]
    }
    for cp in CONTEXTS:
        found[f"share-cp{cp}_CP"] = packing.places_by_cp_rank(12, cp)
        found[f"rows-cp{cp}_CR"] = packing.rows_by_cp_rank(CUMULATIVE_PADDED, cp)
        found[f"none-cp{cp}_CR"] = packing.rows_by_cp_rank([0, 0], cp)
    return found


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored length, verdict, row, output and gradient."""
        values = stored("packed_rows")
        multiples = [packing.divider(tp, cp, sequence_parallel=sp) for tp, cp, sp in SIZES]
        answers = told("lengths", {"multiples": multiples})
        for i, lengths in enumerate(LENGTHS):
            answers |= told(f"lengths-{i}", of_lengths(lengths, values[f"lengths-{i}/in/claimed_NS"].tolist()))
        for case in PACKS:
            own = given(values, case)
            answers |= told(case, of_packing(own, case) | of_layer(own, experts_of(values), case))
        assert_twins("packed_rows", answers | told("context", of_context(values["context/in/order_R"].tolist())))
