"""Tags: hidden states that encode their rank, microbatch and token, and stay exact in every dtype.

A tag is a codeword of signs: 32 bits (rank, microbatch, token, check), mixed, one per column, repeated with alternating
polarity over the hidden size. Signs survive bf16, fp8 scales and weights multiplied into the row; the sum of two
different rows has zeros and decodes as corrupt; an all-zero row is padding.

The probe expert e returns values in its block of columns only, so no output element ever has two addends, and every
product here fits the 8 significant bits of bf16: weights m/8 (3 bits) times upstream gradients m/4 (3 bits) times
the parts of at most four etp shards (2 bits); gains are powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RANK_BITS, MICROBATCH_BITS, TOKEN_BITS, CHECK_BITS = 9, 3, 10, 10
WORD_BITS = RANK_BITS + MICROBATCH_BITS + TOKEN_BITS + CHECK_BITS
PADDING_ANSWER = 2.0**14  # larger than anything that a probe run can yield

_PARTS = {1: (1.0,), 2: (2.0, -1.0), 4: (2.0, -2.0, 2.0, -1.0), 8: (1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 2.0, -1.0)}

_WORD = (1 << WORD_BITS) - 1
# The two forms of a word, for many ranks with up to 1,024 tokens and for few with up to 8,192: bits for the rank, bits
# for the token, and the check before mixing, which distinguishes the forms.
_FORMS = ((RANK_BITS, TOKEN_BITS, 0b1011001110), (RANK_BITS - 3, TOKEN_BITS + 3, 0b0100110001))
_MIX, _UNMIX = 0x9E3779B1, pow(0x9E3779B1, -1, 1 << WORD_BITS)


def _mix(word: Tensor) -> Tensor:
    """Mix the bits of a word invertibly, so that every bit affects the whole word.

    The block of one expert is a few columns only, and two tokens should differ there too: after mixing they differ in
    each column with probability 1/2.
    """
    for _ in range(2):
        word = word ^ (word >> 16)
        word = (word * _MIX) & _WORD
    return word ^ (word >> 16)


def _unmix(word: Tensor) -> Tensor:
    """Return the word that `_mix` maps to this one."""
    word = word ^ (word >> 16)
    for _ in range(2):
        word = (word * _UNMIX) & _WORD
        word = word ^ (word >> 16)
    return word


def encode(rank: int, microbatch: int, tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Return the tags x_TD of all tokens of one rank in one microbatch: entries +1 and -1.

    Raises:
        ValueError: hidden < 32, or a number does not fit its bits: of 512 ranks, or of 64 with more than 1,024 tokens.
    """
    if hidden < WORD_BITS:
        raise ValueError(f"tags need a hidden size of at least {WORD_BITS}, got {hidden}")
    rank_bits, token_bits, check = _FORMS[tokens > 1 << TOKEN_BITS]
    for name, value, bits in (
        ("rank", rank, rank_bits),
        ("microbatch", microbatch, MICROBATCH_BITS),
        ("tokens", max(tokens - 1, 0), token_bits),
    ):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"tags have {bits} bits for {name}, {value} does not fit")
    token_T = torch.arange(tokens)
    data_T = (rank << (MICROBATCH_BITS + token_bits)) | (microbatch << token_bits) | token_T
    word_T = _mix((data_T << CHECK_BITS) | check)
    column_D = torch.arange(hidden)
    bit_TD = (word_T[:, None] >> (column_D % WORD_BITS)) & 1
    bit_TD = bit_TD ^ ((column_D // WORD_BITS) & 1)
    return (1 - 2 * bit_TD).to(dtype)


@dataclass(frozen=True)
class Decoded:
    """The decoded tags of R rows. Where `kind_R` is not TAG the other fields are -1 (scale: 0)."""

    kind_R: Tensor  # TAG, PADDING or CORRUPT
    rank_R: Tensor
    microbatch_R: Tensor
    token_R: Tensor
    scale_R: Tensor  # float64: the common magnitude of the row, 1 where no weight was applied


TAG, PADDING, CORRUPT = 0, 1, 2


def decode(rows_RD: Tensor) -> Decoded:
    """Decode rows. A row is a tag if all magnitudes are equal, all repetitions agree, and the checksum fits."""
    rows_RD = rows_RD.detach().cpu().to(torch.float64)
    R, D = rows_RD.shape
    column_D = torch.arange(D)
    bit_RD = (rows_RD < 0).long() ^ ((column_D // WORD_BITS) & 1)
    word_R = (bit_RD[:, :WORD_BITS] << torch.arange(min(D, WORD_BITS))).sum(1)
    again_RD = (word_R[:, None] >> (column_D % WORD_BITS)) & 1
    plain_R = _unmix(word_R)
    data_R = plain_R >> CHECK_BITS
    scale_R = rows_RD.abs().amax(1) if D else rows_RD.new_zeros(R)
    flat_R = (rows_RD.abs() == scale_R[:, None]).all(1) & torch.isfinite(scale_R)
    check_R = plain_R & ((1 << CHECK_BITS) - 1)
    known_R = torch.isin(check_R, torch.tensor([check for *_, check in _FORMS]))
    fits_R = (again_RD == bit_RD).all(1) & known_R
    kind_R = torch.where(flat_R & fits_R & (scale_R > 0), TAG, CORRUPT)
    kind_R = torch.where((rows_RD == 0).all(1), PADDING, kind_R)
    tag_R = kind_R == TAG
    rank_R, microbatch_R, token_R = (torch.full_like(data_R, -1) for _ in range(3))
    for rank_bits, token_bits, check in _FORMS:
        fields = (
            (rank_R, MICROBATCH_BITS + token_bits, rank_bits),
            (microbatch_R, token_bits, MICROBATCH_BITS),
            (token_R, 0, token_bits),
        )
        for field_R, shift, bits in fields:
            field_R[tag_R & (check_R == check)] = ((data_R >> shift) & ((1 << bits) - 1))[tag_R & (check_R == check)]
    return Decoded(kind_R, rank_R, microbatch_R, token_R, torch.where(tag_R, scale_R, 0.0))


def gain(expert: int) -> float:
    """Return the factor of the probe expert: a power of two, different for neighbours."""
    return 2.0 ** (expert % 3 - 1)


def part(index: int, of: int) -> float:
    """Return the factor of etp shard `index` of `of`: unequal parts that sum to one.

    Raises:
        ValueError: there are no parts for that many shards.
    """
    if of not in _PARTS:
        raise ValueError(f"the probe has parts for {sorted(_PARTS)} etp shards, not for {of}")
    return _PARTS[of][index]


def padding_answer(dtype: torch.dtype, hidden: int) -> float:
    """Return the value that the probe expert returns in padding rows.

    In float16 the sum over D columns of its products with upstream gradients, below 2, is finite: a combine by products
    with one-hot tensors computes these in its backward, before a 0 removes the padding.

    >>> padding_answer(torch.float32, 34), padding_answer(torch.float16, 34)
    (16384.0, 512.0)
    """
    if dtype != torch.float16:
        return PADDING_ANSWER
    return min(PADDING_ANSWER, 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / (2 * hidden))))
