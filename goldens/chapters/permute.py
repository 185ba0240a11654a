"""Golden of orders: renamed tokens and experts, padded rows of experts, rows by index, received rows reordered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, gradients, leaf, named, prefixed
from moe_conformance.reference.permute import orders, padded_segments, reorder, row_index

K, E, D = 3, 6, 2
# name: tokens by rank of the exchange group, and the experts of the rank that receives
RANKS: Mapping[str, tuple[Sequence[int], Sequence[int]]] = {
    "four-ranks": ((5, 0, 3, 1), (4, 1, 5)),  # 5 gets nothing
    "one-rank": ((4,), tuple(range(E))),
    "no-token": ((0, 0), (2, 3)),
}
PADDINGS = ((1, False), (4, False), (4, True))  # the multiple, and whether an empty segment is padded
CLAIMS, PAIRS, MULTIPLES = tuple(range(13)), tuple(range(10)), (1, 4)
INDEX = (-7, -1, 0, 1, 2, 3, 4, 5, 10**9)  # of T = 4 tokens
COUNTS: Mapping[str, Sequence[Sequence[int]]] = {  # rows from each source for each local expert
    "uneven": ((1, 2, 0, 3), (0, 0, 0, 0), (2, 1, 4, 0)),
    "equal": ((2, 2, 2), (2, 2, 2)),
    "one-source": ((1, 0, 2),),
    "nothing": ((0, 0), (0, 0)),
}


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return ids with empty slots and experts named twice, orders, indices with sentinels, and rows."""
    found: dict[str, Tensor] = {}
    for case, (tokens, experts) in RANKS.items():
        ids = [rng.integers(-1, E - 1, size=(T, K)) for T in tokens]
        R = sum(int(np.isin(ids_TK, experts).sum()) for ids_TK in ids)
        found |= named(case, "in", {f"ids_TK-{rank}": ids_TK for rank, ids_TK in enumerate(ids)})
        order_R = [*rng.permutation(R // 2), *range(R // 2, R), *range(R)[-1:]]  # the last row comes twice
        found |= named(case, "in", {"order_R": order_R})
    for case, T in (("names", 4), ("names-of-one", 1), ("names-of-none", 0)):
        slots_TK = np.array([rng.permutation(K) for _ in range(T)], dtype=np.int64).reshape(T, K)
        orders = {"order_T": rng.permutation(T), "slots_TK": slots_TK, "new_E": rng.permutation(E)}
        values = {name: rng.standard_normal((T, K)) for name in ("values_TK", "upstream_TK")}
        values |= {"gate_E": rng.standard_normal(E)}
        found |= named(case, "in", {**orders, **values, "ids_TK": rng.integers(-1, E, size=(T, K))})
    for case, T, R in (("index", 4, 11), ("index-of-none", 0, 5), ("no-index", 4, 0)):
        shapes = {"x_TD": (T, D), "dy_TD": (T, D), "out_RD": (R, D), "drows_RD": (R, D), "weights_R": (R,)}
        rows = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        found |= named(case, "in", {**rows, "index_R": rng.choice(INDEX, size=R)})
    for case, counts_WN in COUNTS.items():
        rows = {name: rng.standard_normal((int(np.sum(counts_WN)), D)) for name in ("rows_RD", "upstream_RD")}
        found |= named(case, "in", {"counts_WN": counts_WN, **rows})
    return found | named("segments", "in", {"counts_N": 4 * rng.integers(0, 3, 7), "missing_N": rng.integers(0, 4, 7)})


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return the rows after each reordering, and their gradients."""
    found = named("segments", "out", _segments(given(inputs, "segments"), oracle))
    for case, (tokens, experts) in RANKS.items():
        ids_by_rank = [inputs[f"{case}/in/ids_TK-{rank}"] for rank in range(len(tokens))]
        found |= named(case, "out", _rows(ids_by_rank, experts, inputs[f"{case}/in/order_R"], oracle))
    for cases, answer in (
        (("names", "names-of-one", "names-of-none"), _names),
        (("index", "index-of-none", "no-index"), _by_index),
        (COUNTS, _reordered),
    ):
        for case in cases:
            found |= named(case, "out", answer(given(inputs, case), oracle))
    return found


def _segments(drawn: Mapping[str, Tensor], oracle: Oracle) -> dict[str, object]:
    counts = drawn["counts_N"].tolist()
    rows = (drawn["counts_N"] - drawn["missing_N"]).clamp(min=0).tolist()
    return {
        "legal_MCP": [
            [oracle.legal_counts([claim] * len(PAIRS), PAIRS, multiple) for claim in CLAIMS] for multiple in MULTIPLES
        ],
        "starts_N": oracle.segment_starts(counts),
        "padding_R": oracle.padding_rows(counts, rows),
    }


def _rows(ids_by_rank: Sequence[Tensor], experts: Sequence[int], order_R: Tensor, oracle: Oracle) -> dict[str, object]:
    """Return the rows of a rank's experts, and whose of them stand in order, also after some of the rows are moved."""
    found: dict[str, object] = {}
    for multiple, pad_empty in PADDINGS:
        rows = oracle.expert_major(ids_by_rank, experts, multiple=multiple, pad_empty=pad_empty)
        name = f"rows-of-{multiple}{'-empty-too' if pad_empty else ''}_R4"
        found[name] = torch.stack([rows.expert, rows.source, rows.token, rows.slot], dim=1)
        found[name.replace("rows", "order").replace("_R4", "_N2")] = _verdicts(rows, oracle)
    rows = oracle.expert_major(ids_by_rank, experts)
    moved = oracle.Rows(rows.source[order_R], rows.token[order_R], rows.slot[order_R], rows.expert[order_R])
    return {**found, "order-of-moved_N2": _verdicts(moved, oracle)}


def _verdicts(rows: orders.Rows, oracle: Oracle) -> Tensor:
    verdicts = [[expert, int(verdict)] for expert, verdict in sorted(oracle.in_order(rows).items())]
    return torch.tensor(verdicts, dtype=torch.int64).reshape(-1, 2)


def _names(drawn: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    tokens_TK, slots_TK = leaf(drawn["values_TK"]), leaf(drawn["values_TK"])
    moved = {
        "tokens": oracle.reorder_tokens(tokens_TK, drawn["order_T"]),
        "slots": oracle.reorder_slots(slots_TK, drawn["order_T"], drawn["slots_TK"]),
    }
    back = gradients(list(moved.values()), {"tokens": tokens_TK, "slots": slots_TK}, [drawn["upstream_TK"]] * 2)
    renamed = oracle.relabel_parameters({("gain", e): drawn["gate_E"][e] for e in range(E)}, drawn["new_E"])
    return {
        **{f"{name}_TK": value for name, value in {**moved, **back}.items()},
        "ids_TK": oracle.reorder_slots(drawn["ids_TK"], drawn["order_T"], drawn["slots_TK"]),
        "relabelled_TK": oracle.relabel(drawn["ids_TK"], drawn["new_E"]),
        "gate_E": torch.stack([renamed["gain", e] for e in range(E)]),
    }


def _by_index(drawn: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    """Return rows gathered and scattered; rows at sentinels are NaN and must reach no result."""
    index_R, T = drawn["index_R"], len(drawn["x_TD"])
    sentinel_R = (index_R < 0) | (index_R >= T)
    leaves = {name: leaf(drawn[name]) for name in ("x_TD", "out_RD", "weights_R")}
    rows_RD = oracle.gather(leaves["x_TD"], index_R)
    out_RD = leaves["out_RD"].masked_fill(sentinel_R[:, None], nan)
    y_TD = oracle.scatter(out_RD, index_R, leaves["weights_R"].masked_fill(sentinel_R, nan), T)
    back = gradients([rows_RD, y_TD], leaves, [drawn["drows_RD"], drawn["dy_TD"]])
    return {"rows_RD": rows_RD, "y_TD": y_TD, **back}


def _reordered(drawn: Mapping[str, Tensor], oracle: Oracle) -> dict[str, Tensor]:
    counts_WN, upstream_RD = drawn["counts_WN"], drawn["upstream_RD"]
    found = {"positions_R": oracle.reorder_positions(counts_WN)}
    for name, way in (("to-expert", oracle.to_expert_major), ("to-source", oracle.to_source_major)):
        rows_RD = leaf(drawn["rows_RD"])
        moved_RD = way(rows_RD, counts_WN)
        found |= prefixed(name, {"rows_RD": moved_RD, **gradients([moved_RD], {"rows_RD": rows_RD}, [upstream_RD])})
    return found


REQUIREMENTS = ("EXCH-04", "EXCH-13", "EXCH-14", "EXCH-18", "EXCH-19", "EXCH-20", "EXCH-21")

CHAPTER = Chapter(2406, REQUIREMENTS, functions(orders, padded_segments, reorder, row_index), draw, work_out)
