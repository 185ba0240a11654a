"""DeepEP's `Buffer` as its source documents it, without its kernels: the normal kernels within a node.

From deep_ep/buffer.py, csrc/config.hpp and csrc/deep_ep.cpp of deepseek-ai/DeepEP, branch hybrid-ep at 94a9f8f; main at
dd758ca (2.1.0) has the same `Buffer` in `deep_ep.buffers.legacy`. Low-latency kernels, RDMA and float8 do not stand in.

T tokens of this rank, K slots, E experts, N experts held, D hidden, W ranks of the group, R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.stand_ins.events import EventOverlap, begin
from moe_conformance.stand_ins.rows import Sends

topk_idx_t = torch.int64
_KNOWN_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
_PEERS = 8  # ranks within one node, as the size hints have it

Layout = tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]


@dataclass(frozen=True)
class Config:
    """How a kernel is tuned; here for its size hints alone."""

    num_sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes, a multiple of 128."""
        return 128 * hidden_bytes * min(num_ranks, _PEERS) * self.num_sms

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes: none for as many ranks as one node has."""
        return 0 if num_ranks <= _PEERS else 128 * hidden_bytes * num_ranks // _PEERS * self.num_sms


class Handle(NamedTuple):
    """What a later combine or dispatch needs: six parts, as the library's, which no caller looks into."""

    sends: Sends
    experts: int
    held: int
    topk: int
    ids_RK: Tensor | None
    is_token_in_rank: Tensor


class Buffer:
    """The communication buffer of a group."""

    num_sms: ClassVar[int] = 20
    agreed = 0  # on which the ranks of a dispatch have to agree; 1.x needs nothing of the kind
    alive: ClassVar[list[Buffer]] = []  # of those that are destroyed explicitly

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: None = None,
    ) -> None:
        """Allocate; only the normal kernels within a node stand in here."""
        assert num_nvl_bytes % 128 == 0
        assert not num_rdma_bytes, "no RDMA buffer within a node"
        assert not low_latency_mode
        assert not allow_mnnvl
        assert not enable_shrink
        assert not comm
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.explicitly_destroy, self._destroyed = explicitly_destroy, False
        if explicitly_destroy:
            Buffer.alive.append(self)

    def destroy(self) -> None:
        """Free it."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._destroyed = True
        Buffer.alive.remove(self)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether the kernels were built with what SM90 has, RDMA among it."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the number of multiprocessors of the kernels."""
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the recommended tuning."""
        assert num_ranks in _KNOWN_SIZES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Layout:
        """Return tokens per rank, per RDMA rank (none), per expert, which token goes to which rank, and an event."""
        _require(topk_idx, 2, topk_idx_t)
        assert num_experts > 0
        end = begin(previous_event, async_finish, allocate_on_comm_stream)
        per_rank_W, per_expert_E, in_rank_TW = self._layout(topk_idx, num_experts)
        return per_rank_W, None, per_expert_E, in_rank_TW, end((per_rank_W, per_expert_E, in_rank_TW))

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Return rows, local ids, weights, counts, handle and an event; with a handle rows and an event alone."""
        assert not num_worst_tokens
        self._require_rows(x)
        end = begin(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            assert len(x) == len(handle.is_token_in_rank), "is_token_in_rank.size(0) == x.size(0)"
            rows_RD = handle.sends.sent(x[handle.sends.token_M])
            return rows_RD, None, None, None, None, end((rows_RD,))
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert num_tokens_per_rdma_rank is None
        assert topk_idx is not None  # without ids the library sends rows alone, which no caller here asks for
        assert topk_weights is not None, "topk_idx.has_value() == topk_weights.has_value()"
        _require(topk_idx, 2, topk_idx_t)
        _require(topk_weights, 2, torch.float32)
        assert topk_idx.shape == topk_weights.shape
        assert len(topk_idx) == len(x)
        experts = len(num_tokens_per_expert)
        assert experts % self.group_size == 0, "num_experts % num_ranks == 0"
        self._require_layout(topk_idx, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        sends, held = Sends.of(is_token_in_rank, self.group, self.agreed), experts // self.group_size
        rows_RD = sends.sent(x[sends.token_M])
        ids_RK, weights_RK = self.slots(sends, held, topk_idx, topk_weights)
        counts_N = torch.bincount(ids_RK[ids_RK >= 0], minlength=held)
        counts = [-(-count // expert_alignment) * expert_alignment for count in counts_N.tolist()]
        known = Handle(sends, experts, held, topk_idx.shape[1], ids_RK.clone(), is_token_in_rank)
        return rows_RD, ids_RK, weights_RK, counts, known, end((rows_RD, ids_RK, weights_RK))

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return the sums, those of the weights and an event."""
        self._require_summands(x)
        end = begin(previous_event, async_finish, allocate_on_comm_stream)
        sends = handle.sends
        if sends.rows != len(x):
            raise RuntimeError("Assertion failed: src_idx.size(0) == num_tokens")
        weights_TK = None
        if topk_weights is not None:
            _require(topk_weights, 2, torch.float32)
            assert len(topk_weights) == len(x)
        y_TD = sends.summed(x)
        if topk_weights is not None:
            weights_TK = sends.summed(topk_weights)
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        assert not isinstance(bias, tuple) or len(bias) == 2
        for bias_TD in biases:
            _require(bias_TD, 2, x.dtype)
            assert bias_TD.shape == y_TD.shape
            y_TD = y_TD + bias_TD
        return y_TD, weights_TK, end((y_TD, weights_TK))

    def _layout(self, ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return per_rank_W, per_expert_E and in_rank_TW, in which a token is once per rank."""
        held = experts // self.group_size
        token_P, slot_P = (ids_TK >= 0).nonzero(as_tuple=True)
        expert_P = ids_TK[token_P, slot_P]
        in_rank_TW = torch.zeros(len(ids_TK), self.group_size, dtype=torch.bool)
        in_rank_TW[token_P, expert_P // held] = True
        per_expert_E = torch.bincount(expert_P, minlength=experts)
        return in_rank_TW.sum(0).int(), per_expert_E.int(), in_rank_TW

    def slots(self, sends: Sends, held: int, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Send ids and weights: local ids and -1 for slots of other ranks, with weight 0."""
        rank_M1 = torch.arange(self.group_size).repeat_interleave(torch.tensor(sends.sent_W)).unsqueeze(1)
        ids_MK, weights_MK = ids_TK[sends.token_M], weights_TK[sends.token_M]
        here_MK = (ids_MK >= 0) & (ids_MK // held == rank_M1)
        ids_MK = torch.where(here_MK, ids_MK % held, -1)
        return sends.sent(ids_MK), sends.sent(torch.where(here_MK, weights_MK, 0.0))

    def _require_rows(self, x: Tensor) -> None:
        assert not self._destroyed, "the buffer was destroyed"
        _require(x, 2)
        assert x.shape[1] * x.element_size() % 32 == 0, "hidden_int4 % 2 == 0"

    def _require_summands(self, x: Tensor) -> None:
        assert x.dtype == torch.bfloat16, "Unsupported type"
        self._require_rows(x)

    def _require_layout(self, ids_TK: Tensor, per_rank_W: Tensor, per_expert_E: Tensor, in_rank_TW: Tensor) -> None:
        for given, dims, dtype in ((per_rank_W, 1, torch.int32), (per_expert_E, 1, torch.int32)):
            _require(given, dims, dtype)
        _require(in_rank_TW, 2, torch.bool)
        own = self._layout(ids_TK, len(per_expert_E))
        assert torch.equal(own[0], per_rank_W)
        assert torch.equal(own[1], per_expert_E)
        assert torch.equal(own[2], in_rank_TW)


class WideBuffer(Buffer):
    """A buffer for rows of any floating type and width, which no kernel takes."""

    def _require_rows(self, x: Tensor) -> None:
        assert x.is_floating_point()
        _require(x, 2)

    _require_summands = _require_rows


def _require(tensor: Tensor, dims: int, dtype: torch.dtype | None = None) -> None:
    assert tensor.dim() == dims, f"{tensor.dim()} dimensions, not {dims}"
    assert tensor.is_contiguous(), "is_contiguous()"
    assert dtype is None or tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"
