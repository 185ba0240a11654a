"""Cost in bytes: what may be sent with rows, what a row in a wire format takes, and how much memory rows need.

Source: arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence


def metadata_bytes(ranks: int, experts: int, top_k: int, moved_rows: int, *, map_entry: int | None = None) -> int:
    """Compute how many bytes one rank should send in a forward beside its rows.

    Args: the ranks W of the exchange group, E, K, and the rows of width D that leave this rank; the bytes of an entry
    of a routing map, where whole maps are gathered with the rows.

    Rule: 8 (W E + W) for counts and splits, and 16 K for each row: its ids, weights, scales, indices. With maps
    `map_entry` E for each row in place of these, which the maps tell.

    Decides: COST-06. Source: arithmetic, a receiver has to know the number of rows per source rank and expert.

    >>> metadata_bytes(2, 5, 3, 7), metadata_bytes(2, 5, 3, 7, map_entry=10)
    (432, 446)
    """
    entry = 1 if map_entry is None else map_entry
    if min(ranks, experts, top_k, entry) < 1 or moved_rows < 0:
        sizes = f"W {ranks}, E {experts}, K {top_k}, {moved_rows} rows, entries of {entry} bytes"
        raise ValueError(f"{sizes}: need W, E, K and bytes >= 1, and rows >= 0")
    of_a_row = 16 * top_k if map_entry is None else map_entry * experts
    return 8 * (ranks * experts + ranks) + of_a_row * moved_rows


def row_bytes(hidden: int, bits: int, block: int | None, *, top_k: int = 0, alignment: int = 1) -> int:
    """Compute how many bytes a row in a wire format may take.

    Args:
        hidden: D.
        bits: of one element.
        block: columns that share a float32 scale; None without scales.
        top_k: slots whose id and weight are sent with the row, at 16 bytes each.
        alignment: bytes to whose multiple a transport fills rows up.

    Rule: D bits / 8 + 4 ceil(D / block) + 16 K, rounded up.

    Degenerate: a block of D or more has one scale.

    Decides: COST-09. Source: DeepSeek-V3 section 3.3.3.

    >>> row_bytes(300, 8, 128), row_bytes(300, 8, 512, top_k=2, alignment=16), row_bytes(3, 4, None)
    (312, 336, 2)
    """
    if min(hidden, bits, alignment) < 1 or (block is not None and block < 1) or top_k < 0:
        raise ValueError(f"D {hidden}, {bits} bits, block {block}, K {top_k}, alignment {alignment}: too small")
    scales = 0 if block is None else _up(hidden, block)
    return alignment * _up(_up(hidden * bits, 8) + 4 * scales + 16 * top_k, alignment)


def most_rows(rows_N: Sequence[int], multiple: int = 1) -> int:
    """Compute how many rows a delivery without a static size should take at most.

    Args: the rows n of each of the N local experts, and the multiple M to which they are padded.

    Rule: sum of M ceil(n / M), and M for each of the N.

    Degenerate: nothing arrives, N M rows.

    Decides: COST-10. Source: MegaBlocks (Gale et al. 2023; no padding to a capacity).

    >>> most_rows([5, 0, 8], 4), most_rows([0, 0], 4), most_rows([5, 7])
    (28, 8, 14)
    """
    if multiple < 1 or any(rows < 0 for rows in rows_N):
        raise ValueError(f"rows {list(rows_N)}, multiple {multiple}: need rows >= 0 and a multiple >= 1")
    return sum(multiple * _up(rows, multiple) + multiple for rows in rows_N)


def _up(number: int, parts: int) -> int:
    """Divide and round up."""
    return -(-number // parts)
