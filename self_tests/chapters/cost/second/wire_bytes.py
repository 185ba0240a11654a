"""How many bytes and rows an exchange may take, by hand: counted up rather than multiplied out."""

from __future__ import annotations

from collections.abc import Sequence


def metadata_bytes(ranks: int, experts: int, top_k: int, moved_rows: int, *, map_entry: int | None = None) -> int:
    """Bytes beside the rows: a count for each rank and expert, a split for each rank, ids and such, or a map, a row."""
    if min(ranks, experts, top_k, moved_rows + 1) < 1 or (map_entry is not None and map_entry < 1):
        raise ValueError(f"{ranks} ranks, {experts} experts, {top_k} slots, {moved_rows} rows, {map_entry} bytes")
    numbers = 0
    for _rank in range(ranks):
        numbers += experts + 1
    bytes_beside = 8 * numbers
    for _row in range(moved_rows):
        bytes_beside += sum([16] * top_k if map_entry is None else [map_entry] * experts)
    return bytes_beside


def row_bytes(hidden: int, bits: int, block: int | None, *, top_k: int = 0, alignment: int = 1) -> int:
    """Bytes of one row: its bits, a float32 for each block that is begun, 16 for each slot, up to the alignment."""
    if min(hidden, bits, 1 if block is None else block, alignment) < 1 or top_k < 0:
        raise ValueError(f"hidden {hidden}, bits {bits}, block {block}, alignment {alignment}, slots {top_k}")
    size, odd = divmod(hidden * bits, 8)
    if odd:
        size += 1
    if block is not None:
        size += 4 * len(range(0, hidden, block))
    size += 16 * top_k
    while size % alignment:
        size += 1
    return size


def most_rows(rows_N: Sequence[int], multiple: int = 1) -> int:
    """Rows of a delivery: each expert's filled up to the multiple, and one multiple more."""
    if multiple < 1 or any(rows < 0 for rows in rows_N):
        raise ValueError(f"rows {rows_N}, multiple {multiple}")
    total = 0
    for rows in rows_N:
        filled = 0
        while filled < rows:
            filled += multiple
        total += filled + multiple
    return total
