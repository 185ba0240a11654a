"""Packed sequences, worked out twice: lengths, which rows are tokens, and who holds them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.thd import context_shares, packed_rows, packed_sequences
from self_tests.chapters.token_padding import second
from self_tests.oracles.agreement import ints
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

lengths_of_sequences = st.lists(st.integers(0, 5), max_size=4)


class TestLengths:
    @pairs_agree
    @given(st.integers(1, 4), st.integers(1, 4), st.booleans())
    def test_multiples_agree(self, tp: int, cp: int, sequence_parallel: bool) -> None:
        """Two chunks for each cp rank if there are several, and a share for each tp rank under sequence parallel."""
        made = packed_sequences.length_multiple(tp=tp, cp=cp, sequence_parallel=sequence_parallel)
        assert second.divider(tp, cp, sequence_parallel=sequence_parallel) == made

    @pairs_agree
    @given(lengths_of_sequences, st.integers(1, 4))
    def test_lengths_and_their_sums_agree(self, lengths: list[int], multiple: int) -> None:
        """Padded lengths are the smallest multiples; sums have one entry more than sequences."""
        padded = packed_sequences.padded_lengths(lengths, multiple)
        assert [second.next_multiple(length, multiple) for length in lengths] == list(padded)
        for some in (lengths, padded):
            sums = packed_sequences.cumulative(some)
            assert torch.int64 == sums.dtype
            assert second.running_sums(some) == sums.tolist()

    @pairs_agree
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 9), st.data())
    def test_verdicts_on_lists_agree(self, lengths: list[int], multiple: int, how: int, data: st.DataObject) -> None:
        """Right lists, longer padding, and lists that start late, stop early, shift one entry or fall short."""
        room = [second.next_multiple(length, multiple) + multiple * data.draw(st.integers(0, 1)) for length in lengths]
        real, padded = second.running_sums(lengths), second.running_sums(room)
        place = data.draw(st.integers(0, len(lengths)))
        if how == 0:
            real[place] += 1
        elif how == 1:
            padded[place] += data.draw(st.sampled_from([-1, 1]))
        elif how == 2:
            padded = [entry + multiple for entry in padded]
        elif how == 3:
            (real if data.draw(st.booleans()) else padded).pop()
        elif how == 4:
            padded[-1] -= multiple
        elif how == 5:
            padded.append(padded[-1])
        made = packed_sequences.judge_lengths(lengths, ints(real), ints(padded), multiple)
        assert second.judged_lengths(lengths, real, padded, multiple) == made


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Lengths, padded lengths with any room, and rows behind the last sequence."""
    lengths = draw(lengths_of_sequences)
    return lengths, [length + draw(st.integers(0, 2)) for length in lengths], draw(st.integers(0, 2))


class TestPacks:
    @pairs_agree
    @given(packs())
    def test_real_rows_agree(self, case: tuple[list[int], list[int], int]) -> None:
        """Both tell tokens from gaps, between sequences and behind the last."""
        lengths, room, tail = case
        real, padded = second.running_sums(lengths), second.running_sums(room)
        sums = ints(real), ints(padded)
        assert second.real_rows(real, padded) == packed_rows.real_rows(*sums).tolist()
        expected = second.real_rows(real, padded, padded[-1] + tail)
        assert expected == packed_rows.real_rows(*sums, padded[-1] + tail).tolist()
        assert (
            expected == [row not in second.laid_out(lengths, room).gaps for row in range(padded[-1])] + [False] * tail
        )


class TestContextShares:
    @pairs_agree
    @given(st.integers(0, 3), st.integers(1, 4))
    def test_shares_of_a_sequence_agree(self, size: int, cp: int) -> None:
        """Both deal the places of a sequence out alike: a chunk from the front, its mirror image from the back."""
        length = size * (2 * cp if cp > 1 else 1)
        made = [list(share) for share in context_shares.context_share(length, cp)]
        assert second.places_by_cp_rank(length, cp) == made

    @pairs_agree
    @given(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 3), st.data())
    def test_shares_of_a_pack_agree(self, sizes: list[int], cp: int, data: st.DataObject) -> None:
        """Sequence after sequence on every rank, every row once; a share with a row moved or repeated is none."""
        padded = second.running_sums([2 * cp * size for size in sizes])
        made = context_shares.context_rows(ints(padded), cp)
        assert second.rows_by_cp_rank(padded, cp) == [rows.tolist() for rows in made]
        assert all(torch.int64 == rows.dtype for rows in made)
        shares = [rows.tolist() for rows in made]
        rank = data.draw(st.integers(0, cp - 1))
        fault = data.draw(st.sampled_from(["none", "lost", "again", "beyond", "below"]))
        if fault == "lost" and shares[rank]:
            shares[rank].pop()
        elif fault != "none":
            shares[rank].append({"again": 0, "beyond": padded[-1], "below": -1, "lost": 0}[fault])
        verdict = second.each_row_once(shares, padded[-1])
        assert (fault == "none") == verdict
        assert verdict == context_shares.is_partition([ints(share) for share in shares], padded[-1])


test_by_hand = by_hand(
    *rows(lambda length, multiple: packed_sequences.padded_lengths([2, length], multiple), second.next_multiple,
        ("a length of -1", (-1, 2), REFUSED),
        ("multiples of 0", (2, 0), REFUSED),
    ),
    *rows(packed_sequences.cumulative, second.running_sums, ("lengths 2 and -1", ([2, -1],), REFUSED)),
    *rows(
        lambda tp, cp: packed_sequences.length_multiple(tp=tp, cp=cp, sequence_parallel=True),
        lambda tp, cp: second.divider(tp, cp, sequence_parallel=True),
        ("tp 0", (0, 1), REFUSED),
        ("cp 0", (1, 0), REFUSED),
    ),
    *rows(lambda real, padded, *room: packed_rows.real_rows(ints(real), ints(padded), *room), second.real_rows,
        # Empty, of different lengths, not from 0, descending, a sequence longer than its room, fewer rows than told.
        *(
            (f"pack {lists}", lists, REFUSED)
            for lists in [
                ([], []), ([0, 2], [0, 2, 4]), ([1, 2], [0, 2]), ([0, 2], [1, 3]), ([0, 2, 1], [0, 2, 4]),
                ([0, 3], [0, 2]), ([0, 0], [0, -1]), ([0, 2], [0, 3], 2),
            ]
        ),
    ),
    *rows(context_shares.context_share, second.places_by_cp_rank,
        *((f"length, cp {sizes}", sizes, REFUSED) for sizes in [(6, 2), (2, 2), (-4, 2), (4, 0), (-1, 1)]),
    ),
    *rows(lambda padded, cp: context_shares.context_rows(ints(padded), cp), second.rows_by_cp_rank,
        *((f"pack {padded} over cp 2", (padded, 2), REFUSED) for padded in ([], [4, 8], [0, 8, 4], [0, 6])),
        ("no rank holds no pack", ([0], 0), REFUSED),
    ),
)  # fmt: skip
