"""Padding-free batches: the collator that makes one sequence of many, with the sums of their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from moe_conformance.contract import PackedSequences, Unsupported


class Packing:
    """`DataCollatorWithFlattening`, which pads nothing."""

    def __init__(self) -> None:
        from transformers import DataCollatorWithFlattening

        self._collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The collator."""
        return {"lengths": type(self._collator).__qualname__}

    def lay_out(self, lengths: Sequence[int], cp: int, tp: int, sequence_parallel: bool) -> PackedSequences:
        """Flatten sequences of these lengths."""
        if cp > 1 or (sequence_parallel and tp > 1):
            raise Unsupported("the collator pads no sequence: what divides it has to pad the whole batch")
        batch = self._collator([{"input_ids": list(range(length))} for length in lengths])
        return PackedSequences(batch["cu_seq_lens_q"].flatten(), batch["cu_seq_lens_q"].flatten())

    def tokens(self, cu_seqlens: Tensor, cu_seqlens_padded: Tensor) -> Tensor:
        """Refuse: there are no gaps."""
        del cu_seqlens, cu_seqlens_padded
        raise Unsupported("a flattened batch has no gaps between its sequences")

    def share(self, cu_seqlens_padded: Tensor, cp: int, cp_rank: int) -> Tensor:
        """Refuse: shares are torch's."""
        del cu_seqlens_padded, cp, cp_rank
        raise Unsupported("transformers leaves the shares of context ranks to torch, which divides a whole batch")
