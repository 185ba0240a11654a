"""What leaves a rank by its collectives, as the judge of costs reads it from ledgers."""

from __future__ import annotations

from typing import Any

import pytest

from moe_conformance.engine.ledger.entry import Entry
from moe_conformance.judging.observed.traffic import by_phase, bytes_leaving, carries_rows, rows_leaving
from moe_conformance.scenarios.outcome import RankOutcome

D = 32


def call(op: str, *shapes_in: tuple[int, ...], dtype: str = "float32", **fields: Any) -> Entry:
    """A call of rank 1 among ranks 0, 1 and 2, which gives tensors of these shapes."""
    elements = sum(rows * width for rows, width in shapes_in)
    size = {"float32": 4, "bfloat16": 2, "int64": 8}[dtype]
    given: dict[str, Any] = {
        "order": 0, "op": op, "group": "g", "ranks": (0, 1, 2), "sequence": 1, "in_splits": None, "out_splits": None,
        "shapes_in": shapes_in, "shapes_out": (), "dtype": dtype, "bytes_in": elements * size, "bytes_out": 0,
        "reduce": None, "root": None, "peer": None, "tag": None, "asynchronous": False, "where": "",
    }  # fmt: skip
    return Entry(**(given | fields))


class TestRows:
    @pytest.mark.parametrize(
        ("entry", "expected"),
        [
            (call("all_to_all_single", (10, D), in_splits=(2, 7, 1)), 3.0),  # 7 stay
            (call("all_to_all_single", (9, D)), 6.0),  # even splits: a third stays
            (call("all_to_all", (2, D), (7, D), (1, D)), 3.0),
            (call("reduce_scatter", (2, D), (7, D), (1, D)), 3.0),
            (call("reduce_scatter_tensor", (9, D)), 6.0),
            (call("all_gather_into_tensor", (5, D)), 10.0),  # to two others
            (call("all_gather", (5, D)), 10.0),
            (call("all_reduce", (9, D)), 12.0),  # 6 to be reduced, 6 results
            (call("broadcast", (5, D), root=1), 10.0),
            (call("broadcast", root=0), 0.0),  # this rank only receives
            (call("send", (5, D), peer=2, sequence=None), 5.0),
            (call("recv", peer=2, sequence=None), 0.0),
            (call("all_to_all_single", (4, D), in_splits=(4,), ranks=(1,)), 0.0),  # with itself
        ],
    )
    def test_a_ranks_own_part_stays(self, entry: Entry, expected: float) -> None:
        """Rows count once for each other rank that gets them; what stays counts nothing."""
        assert expected == rows_leaving(entry, 1, D)

    @pytest.mark.parametrize(
        ("entry", "expected"),
        [
            (call("all_to_all_single", (10, D), dtype="bfloat16"), True),
            (call("all_to_all_single", (10, D), dtype="int64"), False),  # as many ids as columns
            (call("all_to_all_single", (10, 8)), False),  # weights
            (call("all_to_all", (10, D), (0, D), (3, D)), True),
            (call("barrier"), False),
        ],
    )
    def test_rows_are_told_from_what_travels_beside(self, entry: Entry, expected: bool) -> None:
        """Floating numbers with D columns are rows; counts, ids and weights are not."""
        assert expected is carries_rows(entry, D)


class TestBytes:
    @pytest.mark.parametrize(("dtype", "expected"), [("int64", 48.0), ("bfloat16", 12.0)])
    def test_bytes_follow_the_dtype(self, dtype: str, expected: float) -> None:
        """Of three numbers to each of three ranks, two thirds leave."""
        assert expected == bytes_leaving(call("all_to_all_single", (3, 3), dtype=dtype), 1)

    def test_nothing_given_is_nothing(self) -> None:
        """A barrier moves no bytes."""
        assert 0 == bytes_leaving(call("barrier"), 1)


class TestPhases:
    def test_calls_belong_to_the_phase_that_they_were_made_in(self) -> None:
        """A phase ends where the next one begins; one without calls is empty."""
        calls = tuple(call("all_reduce", (n, D)) for n in range(5))
        phases = (("forward:0", 1), ("backward:0", 3), ("finish", 3), ("done", 5))
        found = by_phase(RankOutcome(rank=1, status="ok", phases=phases, ledger=calls))
        assert {"forward:0": calls[1:3], "backward:0": (), "finish": calls[3:]} == found

    def test_a_phase_may_be_entered_again(self) -> None:
        """What is called after each time that the experts are asked is one phase."""
        calls = tuple(call("all_reduce", (n, D)) for n in range(5))
        names = ("forward:0", "answered:0", "answered:0", "forward:1", "answered:0", "done")
        phases = tuple(zip(names, range(6), strict=True))
        found = by_phase(RankOutcome(rank=1, status="ok", phases=phases, ledger=calls))
        assert {"forward:0": calls[:1], "answered:0": (*calls[1:3], calls[4]), "forward:1": calls[3:4]} == found
