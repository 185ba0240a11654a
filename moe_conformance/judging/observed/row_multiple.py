"""The number of rows of a rank's experts, with each expert padded to the multiple that the backend claims."""

from __future__ import annotations

from collections.abc import Sequence

from moe_conformance.judging.findings import count


def padded_rows(rows_N: Sequence[int], multiple: int) -> int:
    """Return the number of rows of a rank's experts, each padded: the sum of ceil(rows / multiple) * multiple."""
    return sum(-(-rows // multiple) * multiple for rows in rows_N)


def rows_words(rows_N: Sequence[int], multiple: int) -> str:
    """Return the number of rows without and with padding in words: "16 rows (48 in multiples of 8)"."""
    padded = padded_rows(rows_N, multiple)
    rows = count(sum(rows_N), "row")
    return rows if padded == sum(rows_N) else f"{rows} ({padded} in multiples of {multiple})"
