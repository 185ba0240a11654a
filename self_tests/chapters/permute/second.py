"""Orders of rows by hand: shuffled tokens and slots, relabelled experts, segments and their padding, row indices.

Nothing is sorted or gathered by a library: every row is carried by itself to where a formula says it belongs, and
every gradient of a row index is its sum, written out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Anything = TypeVar("Anything")


def must_be_order(order: Sequence[int], size: int) -> None:
    """Refuse what does not name each of 0 .. size - 1 once."""
    if len(order) != size or any(list(order).count(i) != 1 for i in range(size)):
        raise ValueError(f"{order} is no order of {size}")


# ---- the same work in another order (EXCH-13, -14) ---------------------------------------------------------


def tokens_in_order(values: Sequence[Anything], order: Sequence[int]) -> list[Anything]:
    """Place i is what stood at place p(i)."""
    must_be_order(order, len(values))
    return [values[order[i]] for i in range(len(values))]


def slots_in_order(
    values: Sequence[Sequence[Anything]], order: Sequence[int], slots: Sequence[Sequence[int]]
) -> list[list[Anything]]:
    """Place (i, j) is what stood at token p(i), slot q_p(i)(j): every old token brings its own order of slots."""
    must_be_order(order, len(values))
    if len(slots) != len(values):
        raise ValueError(f"{len(slots)} orders of slots for {len(values)} tokens")
    for row, q in zip(values, slots, strict=True):
        must_be_order(q, len(row))
    shuffled = []
    for i in range(len(values)):
        old = order[i]
        shuffled.append([values[old][slots[old][j]] for j in range(len(values[old]))])
    return shuffled


def renamed(ids: Sequence[Sequence[int]], names: Sequence[int]) -> list[list[int]]:
    """Every expert under its new number, empty slots as they are."""
    must_be_order(names, len(names))
    made = []
    for row in ids:
        if any(not -1 <= expert < len(names) for expert in row):
            raise ValueError(f"{row} names an expert outside 0 .. {len(names) - 1}")
        made.append([names[expert] if expert != -1 else -1 for expert in row])
    return made


def renamed_parameters(
    parameters: Mapping[tuple[str, int], Anything], names: Sequence[int]
) -> dict[tuple[str, int], Anything]:
    """What expert e had is what expert names[e] has."""
    must_be_order(names, len(names))
    if any(not 0 <= expert < len(names) for _, expert in parameters):
        raise ValueError(f"parameters of experts outside 0 .. {len(names) - 1}")
    return {(name, names[expert]): value for (name, expert), value in parameters.items()}


# ---- rows of experts, and their padding (EXCH-18, -20, -21) ------------------------------------------------


class Row(NamedTuple):
    """One row in an expert's segment: whose, and for which slot; (-1, -1, -1) is padding."""

    expert: int
    source: int
    token: int
    slot: int


def smallest_multiple(rows: int, multiple: int) -> int:
    """M, 2 M, 3 M, ... until the rows fit; 0 for none."""
    if rows < 0 or multiple < 1:
        raise ValueError(f"no multiple of {multiple} holds {rows} rows")
    while rows % multiple:
        rows += 1
    return rows


def segments(
    ids_by_rank: Sequence[Ints], experts: Sequence[int], multiple: int = 1, *, pad_empty: bool = False
) -> list[Row]:
    """All rows for these experts: one segment each, rows by source, token and slot, padding at its end."""
    if len(set(experts)) != len(experts) or any(expert < 0 for expert in experts):
        raise ValueError(f"experts {experts}")
    if any(int(expert) < -1 for ids_TK in ids_by_rank for expert in ids_TK.flat):
        raise ValueError("an id below -1")
    buckets: dict[int, list[Row]] = {expert: [] for expert in experts}
    for source, ids_TK in enumerate(ids_by_rank):
        for token in range(ids_TK.shape[0]):
            for slot in range(ids_TK.shape[1]):
                expert = int(ids_TK[token, slot])
                if expert in buckets:
                    buckets[expert].append(Row(expert, source, token, slot))
    rows = []
    for expert, bucket in buckets.items():
        count = smallest_multiple(len(bucket), multiple)
        if count == 0 and pad_empty and multiple > 1:
            count = multiple
        rows += bucket + [Row(expert, -1, -1, -1)] * (count - len(bucket))
    return rows


def ascending(rows: Sequence[Row]) -> dict[int, bool]:
    """Per expert: does each of its rows stand behind all of its rows with smaller (source, token, slot)?"""
    verdicts = {row.expert: True for row in rows}
    for behind, row in enumerate(rows):
        for other in rows[:behind]:
            if row.expert == other.expert and row.source >= 0 and other.source >= 0 and row[1:] <= other[1:]:
                verdicts[row.expert] = False
    return verdicts


def counts_are_legal(claimed: Sequence[int], rows: Sequence[int], multiple: int) -> list[bool]:
    """Per expert: the smallest multiple that holds its rows; for no rows one multiple too, unless nothing is padded."""
    if len(claimed) != len(rows):
        raise ValueError(f"{len(claimed)} counts for {len(rows)} experts")
    least = [smallest_multiple(n, multiple) for n in rows]
    return [
        count == least_count or (n == 0 and count == multiple > 1)
        for count, n, least_count in zip(claimed, rows, least, strict=True)
    ]


def starts(counts: Sequence[int]) -> list[int]:
    """First row of every segment."""
    if any(count < 0 for count in counts):
        raise ValueError(f"counts {counts}")
    begins, row = [], 0
    for count in counts:
        begins.append(row)
        row += count
    return begins


def is_padding(counts: Sequence[int], rows: Sequence[int]) -> list[bool]:
    """For every row of all segments, whether it lies behind its segment's own rows."""
    if len(counts) != len(rows) or any(not 0 <= n <= count for count, n in zip(counts, rows, strict=True)):
        raise ValueError(f"{rows} rows do not fit {counts}")
    return [place >= n for count, n in zip(counts, rows, strict=True) for place in range(count)]


# ---- row indices with sentinels (EXCH-19) ------------------------------------------------------------------


def gathered(x_TD: Floats, index: Sequence[int]) -> Floats:
    """Row r is x at index r, or zeros where the index names no token."""
    T, D = x_TD.shape
    rows_RD = np.zeros((len(index), D))
    for r, i in enumerate(index):
        if 0 <= i < T:
            for d in range(D):
                rows_RD[r, d] = x_TD[i, d]
    return rows_RD


def gathered_backward(T: int, index: Sequence[int], g_RD: Floats) -> Floats:
    """dx_t is the sum of g over the rows that hold token t."""
    dx_TD = np.zeros((T, g_RD.shape[1]))
    for t in range(T):
        for r, i in enumerate(index):
            if i == t:
                dx_TD[t] += g_RD[r]
    return dx_TD


def scattered(out_RD: Floats, index: Sequence[int], weights: Sequence[float], T: int) -> Floats:
    """Token t is the weighted sum of the rows that name it."""
    if not len(out_RD) == len(index) == len(weights) or T < 0:
        raise ValueError(f"{len(out_RD)} rows, {len(index)} indices, {len(weights)} weights, {T} tokens")
    y_TD = np.zeros((T, out_RD.shape[1]))
    for t in range(T):
        for r, i in enumerate(index):
            if i == t:
                y_TD[t] += weights[r] * out_RD[r]
    return y_TD


def scattered_backward(
    out_RD: Floats, index: Sequence[int], weights: Sequence[float], g_TD: Floats
) -> tuple[Floats, Floats]:
    """dout_r = w_r g_i and dw_r = <out_r, g_i> with i the token that row r names; zero where it names none."""
    dout_RD, dw_R = np.zeros(out_RD.shape), np.zeros(len(index))
    for r, i in enumerate(index):
        if i not in range(len(g_TD)):
            continue
        for d in range(out_RD.shape[1]):
            dout_RD[r, d] = weights[r] * g_TD[i, d]
            dw_R[r] += out_RD[r, d] * g_TD[i, d]
    return dout_RD, dw_R


# ---- source-major to expert-major (EXCH-20) ----------------------------------------------------------------


def keys(counts_WN: Ints) -> list[tuple[int, int, int]]:
    """(source, local expert, number) of every row as it arrives."""
    if counts_WN.ndim != 2 or (counts_WN < 0).any():
        raise ValueError(f"counts {counts_WN}")
    W, N = counts_WN.shape
    return [(s, n, i) for s in range(W) for n in range(N) for i in range(counts_WN[s, n])]


def positions(counts_WN: Ints) -> list[int]:
    """Where each arriving row goes: behind all rows of earlier experts, and of earlier sources for its own."""
    W = len(counts_WN)
    goes_to = []
    for s, n, i in keys(counts_WN):
        q = i
        for earlier in range(n):
            for source in range(W):
                q += int(counts_WN[source, earlier])
        for source in range(s):
            q += int(counts_WN[source, n])
        goes_to.append(q)
    return goes_to


def by_expert(rows: Sequence[Anything], counts_WN: Ints) -> list[Anything]:
    """Rows carried from source-major to expert-major order: dealt out to one heap per expert, heaps joined."""
    heaps: list[list[Anything]] = [[] for _ in range(counts_WN.shape[1])]
    for row, (_, n, _) in zip(rows, keys(counts_WN), strict=True):
        heaps[n].append(row)
    return [row for heap in heaps for row in heap]


def by_source(rows: Sequence[Anything], counts_WN: Ints) -> list[Anything]:
    """Rows carried back: each place takes the row that was carried away from it."""
    goes_to = positions(counts_WN)
    if len(goes_to) != len(rows):
        raise ValueError(f"{len(rows)} rows for counts {counts_WN}")
    return [rows[q] for q in goes_to]
