"""Ledgers are lines that can be parsed whenever the rank was killed."""

from __future__ import annotations

import os

import pytest
import torch

from moe_conformance.engine.ledger.entry import Hazard, decode, group_words
from moe_conformance.engine.ledger.operators import Call, Group
from moe_conformance.engine.ledger.recorder import Recorder
from moe_conformance.engine.ledger.table import Count, count

PAIR = Group("a", (0, 3), 0)
X, Y = torch.ones(5, 2), torch.empty(3, 2, dtype=torch.float64)
EXCHANGE = Call("all_to_all_single", PAIR, [X], [Y], [1, 4], [2, 1], None, None, None, None, True)
BROADCAST = Call("broadcast", PAIR, [], [X], None, None, None, 3, None, None, False)
SEND = Call("send", PAIR, [X], [], None, None, None, None, 3, 0, True)


@pytest.fixture
def written() -> bytes:
    """Returns the lines of a recorder: three calls, one of them waited for, and a hazard."""
    lines: list[bytes] = []
    recorder = Recorder(lines.append)
    first = recorder.issue(EXCHANGE)
    recorder.reached("waited", first)
    second = recorder.issue(BROADCAST)
    recorder.issue(SEND)
    recorder.hazard("output touched", second, "there.py:1 (aten.add)")
    return b"".join(lines)


class TestLines:
    def test_what_is_written_is_read(self, written: bytes) -> None:
        """All fields are parsed as they were written."""
        first, second, third = decode(written).entries
        assert ("all_to_all_single", (0, 3), 1, (1, 4), (2, 1)) == (
            first.op,
            first.ranks,
            first.sequence,
            first.in_splits,
            first.out_splits,
        )
        assert (((5, 2),), ((3, 2),), "float32 to float64", 40, 48) == (
            first.shapes_in,
            first.shapes_out,
            first.dtype,
            first.bytes_in,
            first.bytes_out,
        )
        assert [(0, "waited", True), (1, "waited", False), (2, "issued", True)] == [
            (entry.order, entry.state, entry.asynchronous) for entry in (first, second, third)
        ]
        assert (2, 3, None, None) == (second.sequence, second.root, second.in_splits, second.tag)
        assert (None, 3, 0) == (third.sequence, third.peer, third.tag)
        assert f"{os.path.realpath(__file__)}:" in first.where

    def test_a_hazard_is_a_sentence(self, written: bytes) -> None:
        """It names the call, its line, and the line at fault."""
        (hazard,) = decode(written).hazards
        assert ("output touched", 1, "broadcast", (0, 3)) == (hazard.kind, hazard.order, hazard.op, hazard.ranks)
        known = Hazard("output touched", 1, "broadcast", (0, 3), "here.py:7", "there.py:1 (aten.add)")
        expected = (
            "the output of broadcast on group (0, 3), issued at here.py:7, was read or written before wait() at "
            "there.py:1 (aten.add)"
        )
        assert expected == str(known)

    def test_a_cut_last_line_is_left_out(self, written: bytes) -> None:
        """All complete lines are parsed, wherever the file ends."""
        whole = decode(written)
        for end in range(len(written)):
            lines = written[:end].count(b"\n")
            ledger = decode(written[:end])
            assert whole.entries[1:2] * (lines >= 4) == tuple(e for e in ledger.entries[1:2] if e.state == "waited")
            assert (1 <= lines) + (3 <= lines) + (4 <= lines) == len(ledger.entries)

    def test_a_blocking_call_has_come_back_once_there_is_another_or_the_job_ended(self) -> None:
        """Until then its state is "issued"; only asynchronous calls have a line for their wait."""
        lines: list[bytes] = []
        recorder = Recorder(lines.append)
        recorder.issue(BROADCAST)
        recorder.issue(BROADCAST)
        assert ["waited", "issued"] == [entry.state for entry in decode(b"".join(lines)).entries]
        recorder.end()
        assert ["waited", "waited"] == [entry.state for entry in decode(b"".join(lines)).entries]

    def test_tensors_of_several_dtypes_have_their_own_sizes(self) -> None:
        """Bytes are counted per tensor, and all dtypes are named."""
        lines: list[bytes] = []
        Recorder(lines.append).issue(EXCHANGE._replace(inputs=[X, Y], outputs=[]))
        (entry,) = decode(b"".join(lines)).entries
        assert ("float32 to float64", 40 + 48, 0) == (entry.dtype, entry.bytes_in, entry.bytes_out)

    def test_nothing_is_an_empty_ledger(self) -> None:
        """A rank that made no call has no entries."""
        assert ((), ()) == (decode(b"").entries, decode(b"").hazards)


class TestWords:
    def test_groups_are_named_by_their_ranks(self) -> None:
        """All ranks are named if they are few, else the first and last."""
        assert "group (0, 2)" == group_words((0, 2))
        assert "group (0 to 511)" == group_words(tuple(range(512)))
        assert "group (0, 2, 4, ... 62; 32 ranks)" == group_words(tuple(range(0, 64, 2)))


class TestCounts:
    def test_calls_and_bytes_are_counted_by_group_and_operator(self, written: bytes) -> None:
        """Each operator on each group has its own count."""
        counts = count(decode(written + b"").entries)
        assert {
            ((0, 3), "all_to_all_single"): Count(1, 40, 48),
            ((0, 3), "broadcast"): Count(1, 0, 40),
            ((0, 3), "send"): Count(1, 40, 0),
        } == counts
