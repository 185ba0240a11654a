"""Tags say who they are, and what happened to them."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe_conformance.workloads.records import tags

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def some_rows(hidden: int = 40, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of four ranks, two microbatches and five tokens each."""
    return torch.cat([tags.encode(rank, m, 5, hidden, dtype) for rank in (0, 1, 7, 511) for m in (0, 3)])


class TestEncode:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("hidden", [32, 33, 64, 100])
    def test_rows_decode_to_who_they_are(self, hidden: int, dtype: torch.dtype) -> None:
        """Rank, microbatch and token come back, in every dtype and hidden size."""
        decoded = tags.decode(some_rows(hidden, dtype))
        expected = list(itertools.product((0, 1, 7, 511), (0, 3), range(5)))
        found = zip(decoded.rank_R.tolist(), decoded.microbatch_R.tolist(), decoded.token_R.tolist(), strict=True)
        assert expected == list(found)
        assert [tags.TAG] * 40 == decoded.kind_R.tolist()

    @pytest.mark.parametrize("tokens", [1024, 1025, 8192])
    def test_thousands_of_tokens_have_tags(self, tokens: int) -> None:
        """Few ranks may have thousands of tokens each; all rows differ, and say who they are."""
        rows = torch.cat([tags.encode(rank, 7, tokens, 32, torch.float32) for rank in (0, 63)])
        decoded = tags.decode(rows)
        assert [0] * tokens + [63] * tokens == decoded.rank_R.tolist()
        assert [*range(tokens), *range(tokens)] == decoded.token_R.tolist()
        assert {7} == set(decoded.microbatch_R.tolist())
        assert 2 * tokens == len(rows.unique(dim=0))

    @pytest.mark.parametrize(
        ("rank", "microbatch", "tokens", "hidden", "words"),
        [
            (0, 0, 1, 31, "at least 32, got 31"),
            (512, 0, 1, 32, "rank, 512"),
            (0, 8, 1, 32, "microbatch, 8"),
            (0, 0, 8193, 32, "tokens, 8192"),
            (64, 0, 1025, 32, "rank, 64"),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, rank: int, microbatch: int, tokens: int, hidden: int, words: str
    ) -> None:
        """A number that its bits cannot hold is an error that names it."""
        with pytest.raises(ValueError, match=words):
            tags.encode(rank, microbatch, tokens, hidden, torch.float32)


class TestDecode:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_weight_on_the_row_is_its_scale(self, dtype: torch.dtype) -> None:
        """A row times a positive weight is still the same token, at that scale."""
        decoded = tags.decode(some_rows(dtype=dtype) * 0.375)
        assert [0.375] * 40 == decoded.scale_R.tolist()
        assert decoded.token_R.tolist() == tags.decode(some_rows(dtype=dtype)).token_R.tolist()

    def test_no_sum_or_difference_of_two_rows_is_a_row(self) -> None:
        """Every sum and difference of two different rows decodes as corrupt, whatever their weights."""
        rows = some_rows()
        i, j = torch.triu_indices(len(rows), len(rows), 1)
        for a, b in ((1.0, 1.0), (1.0, -1.0), (0.5, 0.25), (0.5, -0.25)):
            kinds = tags.decode(a * rows[i] + b * rows[j]).kind_R
            assert {tags.CORRUPT} == set(kinds.tolist())

    def test_a_doubled_row_has_scale_two(self) -> None:
        """The same row added twice is that token at scale 2."""
        assert [2.0] * 40 == tags.decode(some_rows() * 2).scale_R.tolist()

    def test_zero_rows_are_padding(self) -> None:
        """An all-zero row is padding, and no token."""
        decoded = tags.decode(torch.zeros(3, 32))
        assert [tags.PADDING] * 3 == decoded.kind_R.tolist()
        assert [-1] * 3 == decoded.token_R.tolist()

    @pytest.mark.parametrize("column", range(0, 40, 3))
    def test_one_flipped_sign_is_noticed(self, column: int) -> None:
        """A single wrong sign in any column makes the row corrupt."""
        rows = some_rows()
        rows[:, column] *= -1
        assert {tags.CORRUPT} == set(tags.decode(rows).kind_R.tolist())

    @pytest.mark.parametrize("spoil", [float("nan"), float("inf"), 0.0, 3.0])
    def test_one_spoilt_element_is_noticed(self, spoil: float) -> None:
        """NaN, infinity, zero or another magnitude in one place makes the row corrupt."""
        rows = some_rows()
        rows[:, 17] = spoil
        assert {tags.CORRUPT} == set(tags.decode(rows).kind_R.tolist())

    def test_columns_shifted_by_one_are_noticed(self) -> None:
        """A row rolled along its hidden size is no row."""
        assert {tags.CORRUPT} == set(tags.decode(some_rows().roll(1, dims=1)).kind_R.tolist())

    def test_no_rows_decode_to_nothing(self) -> None:
        """Zero rows are a legal answer."""
        assert [] == tags.decode(torch.empty(0, 32)).kind_R.tolist()


class TestArithmetic:
    @pytest.mark.parametrize("of", [1, 2, 4, 8])
    def test_parts_sum_to_one(self, of: int) -> None:
        """What the etp shards contribute sums to the whole answer, and no shard contributes nothing."""
        parts = [tags.part(index, of) for index in range(of)]
        assert sum(parts) == 1.0
        assert 0.0 not in parts

    def test_no_parts_for_three(self) -> None:
        """A number of shards without parts is refused by name."""
        with pytest.raises(ValueError, match="not for 3"):
            tags.part(0, 3)

    def test_neighbouring_experts_differ_in_gain(self) -> None:
        """Experts next to each other never have the same gain."""
        gains = [tags.gain(expert) for expert in range(16)]
        assert all(a != b for a, b in itertools.pairwise(gains))
