"""To multiples of what an expert's rows are padded, as the backend says, and how many rows that makes."""

from __future__ import annotations

from collections.abc import Sequence

from moe_conformance.judging.findings import count
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import WrongForm


def multiple_of(reading: Reading) -> int:
    """Return the multiple that the exchange says it pads every expert's rows to, 1 where it says none.

    Raises:
        WrongForm: what it says is no whole number above 0.
    """
    stated = reading.ranks[0].resolved.get("multiple", "1")
    if not stated.isdecimal() or not int(stated):
        padded = f"the backend reports that the rows of each expert are padded to multiples of {stated!r}"
        raise WrongForm("dispatch", f"{padded}; expected a positive integer")
    return int(stated)


def padded_rows(rows_N: Sequence[int], multiple: int) -> int:
    """Return how many rows the experts of a rank take, each padded: the sum of ceil(rows / multiple) multiple."""
    return sum(-(-rows // multiple) * multiple for rows in rows_N)


def told_rows(rows_N: Sequence[int], multiple: int) -> str:
    """Say how many rows there are, and how many with what pads them: "16 rows (48 in multiples of 8)"."""
    padded = padded_rows(rows_N, multiple)
    rows = count(sum(rows_N), "row")
    return rows if padded == sum(rows_N) else f"{rows} ({padded} in multiples of {multiple})"
