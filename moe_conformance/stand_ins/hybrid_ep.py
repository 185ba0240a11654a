"""HybridEP's buffer as its source documents it: dispatch with a permutation to experts, and back.

From deep_ep/hybrid_ep_buffer.py, docs/Hybrid-EP_Implementation.md and csrc/hybrid_ep of deepseek-ai/DeepEP, branch
hybrid-ep at 94a9f8f. All ranks are one NVLink domain. Index-based routing and float8 do not stand in.

The rows of an expert come by source rank, then token. With `num_permuted_tokens` and `non_blocking` the buffer has that
many rows: rows beyond it are dropped, the last experts' first, and the flag is set; unfilled rows are garbage.

T tokens of each rank, E experts, N experts held, D hidden, W ranks, M tokens sent, R tokens received, B rows delivered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.stand_ins.events import poison
from moe_conformance.stand_ins.rows import Sends


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """Return the map (T, E), and dense weights if there are any."""
    map_TE = torch.zeros(num_of_tokens, num_of_experts, dtype=torch.bool).scatter(1, topk_idx.long(), True)
    if topk_weights is None:
        return map_TE, None
    return map_TE, torch.zeros(num_of_tokens, num_of_experts).scatter(1, topk_idx.long(), topk_weights)


@dataclass(frozen=True)
class BufferConfig:
    """The sizes that a buffer was allocated for."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int


@dataclass(frozen=True)
class Configurer:
    """Where callers read these sizes."""

    buffer_config: BufferConfig


@dataclass(frozen=True)
class TemplateConfig:
    """The part of HybridEpConfigInstance that a call depends on."""

    num_of_experts_per_rank: int
    pad_multiple: int


class Handle(NamedTuple):
    """Eleven parts, the last of which is the overflow flag."""

    sparse_to_dense_map: Sends
    rdma_to_attn_map: None
    attn_to_rdma_map: None
    num_dispatched_tokens_tensor: Tensor
    local_expert_routing_map: Tensor  # (R, N)
    dense_chunk_layout: Tensor
    dense_to_expert_map: Tensor  # (R, N): the row of the buffer, or -1
    tokens_per_expert: Tensor
    num_of_tokens_per_rank: int
    config: TemplateConfig
    overflow_flag: Tensor


class HybridEPBuffer:
    """The communication buffer of a group, all of which is one NVLink domain."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        """Allocate."""
        assert not use_fp8
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_local_experts = num_local_experts
        self.configurer = Configurer(BufferConfig(hidden_dim, max_num_of_tokens_per_rank, num_local_experts))

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: Handle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, None, Tensor, Handle]:
        """Return rows_BD, their weights if there are any, no scales, padded counts_N and the handle."""
        assert topk_idx is None
        assert topk_weights is None
        assert not use_fp8
        assert scaling_factor is None
        self._require_rows(hidden)
        multiple, rows = pad_multiple or 1, None if num_permuted_tokens is None else int(num_permuted_tokens)
        if non_blocking:
            assert rows is not None, "The num_permuted_tokens is required for non-blocking mode."
            assert rows >= 0, "The num_permuted_tokens is required for non-blocking mode."
            assert rows % multiple == 0, "must be a multiple of pad_multiple in non-blocking mode"
        if handle is None:
            assert routing_map is not None
            assert routing_map.dtype == torch.bool
            assert routing_map.is_contiguous()
            assert len(hidden) == len(routing_map), "The hidden and the routing_map should have the same row number."
            handle = self._preprocessed(routing_map, num_of_experts_per_rank, rows, multiple)
        assert handle.num_of_tokens_per_rank == len(hidden), "This handle could be invalid."
        counts_N = _aligned(handle.tokens_per_expert, multiple)
        if rows is None:
            rows = int(counts_N.sum())
        sends = handle.sparse_to_dense_map
        rows_BD = self._permuted(sends.sent(hidden[sends.token_M]), handle, rows)
        weights_B = None if probs is None else self._permuted_weights(probs, handle, rows)
        return rows_BD, weights_B, None, counts_N, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: Handle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums of the tokens' rows, and dense (T, E) weights if rows have any."""
        assert handle is not None, "The handle is necessary in the combine pass."
        self._require_summands(hidden)
        sends, to_row_RN = handle.sparse_to_dense_map, handle.dense_to_expert_map
        token_P, expert_P = (to_row_RN >= 0).nonzero(as_tuple=True)
        row_P = to_row_RN[token_P, expert_P]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums_RD = torch.zeros(len(to_row_RN), hidden.shape[1], dtype=wide)
        sums_RD.index_add_(0, token_P, hidden[row_P].to(wide))
        y_TD = sends.summed(sums_RD.to(hidden.dtype))
        if probs is None:
            return y_TD, None
        assert probs.dtype == torch.float32
        assert probs.is_contiguous()
        weights_RN = torch.zeros(to_row_RN.shape)
        weights_RN[token_P, expert_P] = probs[row_P]
        return y_TD, self._weights_back(weights_RN, sends)

    def _preprocessed(self, map_TE: Tensor, held: int | None, rows: int | None, multiple: int) -> Handle:
        """Gather what the ranks route, and lay out the buffer; collective."""
        T, E = map_TE.shape
        held = self.num_local_experts if held is None else held
        assert held * self.group_size == E, "num_of_expert == experts per rank * ranks"
        sends = Sends.of(map_TE.reshape(T, self.group_size, held).any(2), self.group, agreed=T)
        ranks_M = torch.arange(self.group_size).repeat_interleave(torch.tensor(sends.sent_W))
        map_RN = sends.sent(map_TE.reshape(T, self.group_size, held)[sends.token_M, ranks_M])
        counts_N = map_RN.sum(0)
        begin_N = (padded := _aligned(counts_N, multiple)).cumsum(0) - padded
        to_row_RN = torch.where(map_RN, begin_N + map_RN.cumsum(0) - 1, -1)
        overflow = rows is not None and int(padded.sum()) > rows
        if rows is not None:
            to_row_RN = torch.where(to_row_RN < rows, to_row_RN, -1)
        return Handle(
            sends, None, None, torch.tensor([sends.rows]), map_RN, torch.tensor([sends.rows]), to_row_RN,
            (to_row_RN >= 0).sum(0), T, TemplateConfig(held, multiple),
            torch.tensor([int(overflow)], dtype=torch.int32),
        )  # fmt: skip

    def _permuted(self, sent_R: Tensor, handle: Handle, rows: int) -> Tensor:
        """Return sent rows at the rows of their experts, zero where experts are padded, garbage beyond."""
        made_B = sent_R.new_empty(rows, *sent_R.shape[1:])
        poison(made_B)
        made_B[: int(_aligned(handle.tokens_per_expert, handle.config.pad_multiple).sum())] = 0
        token_P, expert_P = (handle.dense_to_expert_map >= 0).nonzero(as_tuple=True)
        made_B[handle.dense_to_expert_map[token_P, expert_P]] = sent_R[token_P]
        return made_B

    def _permuted_weights(self, probs_TE: Tensor, handle: Handle, rows: int) -> Tensor:
        assert probs_TE.dtype == torch.float32
        assert probs_TE.is_contiguous()
        sends, held = handle.sparse_to_dense_map, handle.config.num_of_experts_per_rank
        ranks_M = torch.arange(self.group_size).repeat_interleave(torch.tensor(sends.sent_W))
        sent_RN = sends.sent(probs_TE.reshape(len(probs_TE), self.group_size, held)[sends.token_M, ranks_M])
        made_B = sent_RN.new_empty(rows)
        poison(made_B)
        made_B[: int(_aligned(handle.tokens_per_expert, handle.config.pad_multiple).sum())] = 0
        token_P, expert_P = (handle.dense_to_expert_map >= 0).nonzero(as_tuple=True)
        made_B[handle.dense_to_expert_map[token_P, expert_P]] = sent_RN[token_P, expert_P]
        return made_B

    def _weights_back(self, weights_RN: Tensor, sends: Sends) -> Tensor:
        """Return (T, E): every rank sends back the columns of its experts."""
        ranks_M = torch.arange(self.group_size).repeat_interleave(torch.tensor(sends.sent_W))
        back_TWN = torch.zeros(len(sends.in_rank_TW), self.group_size, weights_RN.shape[1])
        back_TWN[sends.token_M, ranks_M] = sends.returned(weights_RN)
        return back_TWN.flatten(1)

    def _require_rows(self, hidden: Tensor) -> None:
        assert hidden.is_contiguous()
        assert hidden.shape[1] % 16 == 0, "hidden_dim % 16 == 0"
        assert hidden.dtype == torch.bfloat16

    def _require_summands(self, hidden: Tensor) -> None:
        assert hidden.element_size() == 2
        assert hidden.is_contiguous()


class WideHybridEPBuffer(HybridEPBuffer):
    """A buffer for rows of any floating type and width, which no kernel takes."""

    def _require_rows(self, hidden: Tensor) -> None:
        assert hidden.is_floating_point()
        assert hidden.is_contiguous()

    _require_summands = _require_rows


def _aligned(counts_N: Tensor, multiple: int) -> Tensor:
    padded_N: Tensor = -(-counts_N // multiple) * multiple
    return padded_N
