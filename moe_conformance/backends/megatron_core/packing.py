"""The library's functions for packed sequences: padded lengths and sums of a batch, and shares of context ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import differences, library
from moe_conformance.contract import PackedSequences, Unsupported, refusals


class Packing:
    """The functions of models.multimodal.context_parallel, and of a packed batch. S sequences, R rows."""

    @property
    def resolved(self) -> Mapping[str, str]:
        """Where the lengths and the sums come from."""
        return {
            "lengths": "get_padding",
            "sums": "get_packed_seq_params",
            "padded sums": "get_packed_seq_params; with cp = 1 by the adapter, multiples of its max_seqlen_q",
            "shares": "get_thd_batch_on_this_cp_rank",
        }

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        """Return the sums of a batch that the library pads.

        With cp = 1 it has no list of padded sums (format sbhd): all sequences have `max_seqlen_q` rows, which its own
        `get_padding` led to.
        """
        if len(set(lengths)) != 1:
            raise Unsupported(f"get_packed_seq_params lays out a batch of one length: not {list(lengths)}")
        padding = library.get_padding(lengths[0], cp, tp, sequence_parallel)
        tokens_SL = torch.empty(len(lengths), lengths[0] + padding)
        packed = library.get_packed_seq_params(tokens_SL, 0, padding, cp, use_packed_sequence=True)
        padded = packed.cu_seqlens_q_padded
        if packed.qkv_format == "sbhd":
            padded = torch.arange(len(lengths) + 1, dtype=torch.int32) * packed.max_seqlen_q
        return PackedSequences(packed.cu_seqlens_q, padded)

    def tokens(self, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """Refuse: the library takes the padding mask from its caller."""
        del cu_seqlens, cu_seqlens_padded
        raise Unsupported("Megatron-Core 0.16 makes no mask of packed sequences: its caller passes one")

    def share(self, cu_seqlens_padded: Tensor, cp: int, cp_rank: int) -> Tensor:
        """Return a rank's part of a batch in which every token is its row number."""
        function = differences.share_of_packed()
        if function is None:
            raise Unsupported("this version has no function for the part of a rank that takes cp as a number")
        rows_1R = torch.arange(int(cu_seqlens_padded[-1])).unsqueeze(0)
        longest = cu_seqlens_padded.diff().max().reshape(1)
        with refusals(AssertionError, match="update Transformer Engine"):
            batch, _ = function({"tokens": rows_1R}, cu_seqlens_padded, cu_seqlens_padded, longest, cp, cp_rank)
        share_R: Tensor = batch["tokens"][0]
        return share_R
