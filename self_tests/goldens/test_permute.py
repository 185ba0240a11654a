"""The goldens of orders are what the longhand makes of the stored inputs, every row carried by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_conformance.goldens.chapters.permute import CLAIMS, COUNTS, MULTIPLES, PADDINGS, PAIRS, RANKS
from self_tests.chapters.permute import second as permute
from self_tests.goldens.golden_twins import assert_twins, given, stored, told


def of_segments(own: Mapping[str, Any]) -> dict[str, Any]:
    """Legal counts, first rows and padding."""
    counts = own["counts_N"].tolist()
    rows = [max(0, count - missing) for count, missing in zip(counts, own["missing_N"].tolist(), strict=True)]
    return {
        "legal_MCP": [
            [permute.counts_are_legal([claim] * len(PAIRS), PAIRS, multiple) for claim in CLAIMS]
            for multiple in MULTIPLES
        ],
        "starts_N": permute.starts(counts),
        "padding_R": permute.is_padding(counts, rows),
    }


def of_rows(ids_by_rank: Sequence[Any], experts: Sequence[int], order: Sequence[int]) -> dict[str, Any]:
    """A rank's rows with every padding, and which experts' are in order."""
    found = {}
    for multiple, pad_empty in PADDINGS:
        rows = permute.segments(ids_by_rank, experts, multiple, pad_empty=pad_empty)
        name = f"of-{multiple}{'-empty-too' if pad_empty else ''}"
        found[f"rows-{name}_R4"] = np.array(rows, dtype=np.int64).reshape(-1, 4)
        found[f"order-{name}_N2"] = verdicts(rows)
    rows = permute.segments(ids_by_rank, experts)
    return {**found, "order-of-moved_N2": verdicts([rows[r] for r in order])}


def verdicts(rows: Sequence[permute.Row]) -> Any:
    """Expert and verdict, by expert."""
    return np.array(sorted(permute.ascending(rows).items()), dtype=np.int64).reshape(-1, 2)


def of_names(own: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens, slots and experts under other names; upstream gradients go where the values came from."""
    order, slots, names = (own[name].tolist() for name in ("order_T", "slots_TK", "new_E"))
    T, K = own["values_TK"].shape
    dtokens_TK, dslots_TK = np.zeros((T, K)), np.zeros((T, K))
    for i in range(T):
        for j in range(K):
            dtokens_TK[order[i], j] = own["upstream_TK"][i, j]
            dslots_TK[order[i], slots[order[i]][j]] = own["upstream_TK"][i, j]
    moved = permute.renamed_parameters({("gain", e): gain for e, gain in enumerate(own["gate_E"])}, names)
    values, ids = own["values_TK"].tolist(), own["ids_TK"].tolist()
    return {
        "tokens_TK": np.reshape(permute.tokens_in_order(values, order), (T, K)),
        "slots_TK": np.reshape(permute.slots_in_order(values, order, slots), (T, K)),
        "ids_TK": np.reshape(permute.slots_in_order(ids, order, slots), (T, K)),
        "relabelled_TK": np.reshape(permute.renamed(ids, names), (T, K)),
        "gate_E": [moved["gain", e] for e in range(len(names))],
        "dtokens_TK": dtokens_TK,
        "dslots_TK": dslots_TK,
    }


def of_index(own: Mapping[str, Any]) -> dict[str, Any]:
    """Rows fetched and added by index; at sentinels the longhand looks at nothing."""
    index, weights, T = own["index_R"].tolist(), own["weights_R"].tolist(), len(own["x_TD"])
    dout_RD, dweights_R = permute.scattered_backward(own["out_RD"], index, weights, own["dy_TD"])
    return {
        "rows_RD": permute.gathered(own["x_TD"], index),
        "dx_TD": permute.gathered_backward(T, index, own["drows_RD"]),
        "y_TD": permute.scattered(own["out_RD"], index, weights, T),
        "dout_RD": dout_RD,
        "dweights_R": dweights_R,
    }


def of_received(own: Mapping[str, Any]) -> dict[str, Any]:
    """Received rows carried to their expert's heap and back; gradients go the other way."""
    counts, shape = own["counts_WN"], own["rows_RD"].shape
    there, back = permute.by_expert, permute.by_source
    return {
        "positions_R": permute.positions(counts),
        "to-expert.rows_RD": np.reshape(there(own["rows_RD"].tolist(), counts), shape),
        "to-expert.drows_RD": np.reshape(back(own["upstream_RD"].tolist(), counts), shape),
        "to-source.rows_RD": np.reshape(back(own["rows_RD"].tolist(), counts), shape),
        "to-source.drows_RD": np.reshape(there(own["upstream_RD"].tolist(), counts), shape),
    }


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored row, verdict, value and gradient."""
        values = stored("permute")
        answers = told("segments", of_segments(given(values, "segments")))
        for case, (tokens, experts) in RANKS.items():
            own = given(values, case)
            ids_by_rank = [own[f"ids_TK-{rank}"] for rank in range(len(tokens))]
            answers |= told(case, of_rows(ids_by_rank, experts, own["order_R"].tolist()))
        for cases, answer in (
            (("names", "names-of-one", "names-of-none"), of_names),
            (("index", "index-of-none", "no-index"), of_index),
            (COUNTS, of_received),
        ):
            for case in cases:
                answers |= told(case, answer(given(values, case)))
        assert_twins("permute", answers)
