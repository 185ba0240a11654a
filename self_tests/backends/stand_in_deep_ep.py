"""DeepEP's `Buffer` as its source documents it, without its kernels: over the portable exchange, on gloo.

It has the signatures of `deep_ep.buffers.legacy` (deepseek-ai/DeepEP main at dd758ca) and refuses what the host side
refuses (csrc/legacy/buffer.hpp), so that an adapter is held to argument names, dtypes, layouts and handles. Inside it
is native's exchange: what it says of an adapter is that the adapter is right, and of DeepEP nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.deep_ep import DeepEP
from moe_conformance.backends.native.fused.token_exchange import Handle, TokenExchange
from moe_conformance.contract import Limit

topk_idx_t = torch.int64
_CHANNELS = 10
_KNOWN_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)

Layout = tuple[Tensor, Tensor | None, Tensor, Tensor, object]


@dataclass(frozen=True)
class Config:
    """How a kernel is tuned; here for its size hints alone."""

    num_sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return bytes, a multiple of 128."""
        return 128 * hidden_bytes * num_ranks * self.num_sms

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return none: all ranks are one node."""
        del hidden_bytes
        assert num_ranks <= 8
        return 0


class Buffer:
    """The communication buffer of a group."""

    num_sms: ClassVar[int] = 20
    alive: ClassVar[list[Buffer]] = []

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
        self.group, self.group_size, self.num_nvl_bytes = group, group.size(), num_nvl_bytes
        self.explicitly_destroy = explicitly_destroy
        Buffer.alive.append(self)

    def destroy(self) -> None:
        """Free it."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        Buffer.alive.remove(self)

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
        previous_event: object = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Layout:
        """Return tokens per rank, per RDMA rank (none), per expert, which token goes to which rank, and an event."""
        assert not previous_event
        assert not async_finish
        assert not allocate_on_comm_stream
        _require(topk_idx, 2, topk_idx_t)
        assert num_experts > 0
        layout = TokenExchange(self.group, num_experts).get_dispatch_layout(topk_idx)
        return layout.tokens_W.int(), None, layout.tokens_E.int(), layout.in_rank_TW, object()

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: object = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Return rows, local ids, weights, counts, handle and an event; with a handle rows and an event alone."""
        assert expert_alignment == 1
        assert not num_worst_tokens
        assert not config
        assert not previous_event
        assert not async_finish
        assert not allocate_on_comm_stream
        self._require_rows(x)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            known, *_ = handle
            assert len(x) == known.tokens, "is_token_in_rank.size(0) == x.size(0)"
            return self._exchange(known).dispatch(x, handle=known).rows_RD, None, None, None, None, object()
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert num_tokens_per_rdma_rank is None
        assert topk_idx is not None  # without ids the library sends rows alone, which no contract of ours asks for
        assert topk_weights is not None, "topk_idx.has_value() == topk_weights.has_value()"
        _require(topk_idx, 2, topk_idx_t)
        _require(topk_weights, 2, torch.float32)
        assert topk_idx.shape == topk_weights.shape
        assert len(topk_idx) == len(x)
        self._require_layout(topk_idx, num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
        exchange = TokenExchange(self.group, len(num_tokens_per_expert))
        arrived = exchange.dispatch(x, topk_idx, topk_weights)
        new = (arrived.handle, *(object() for _ in range(5)))  # six parts, as the library's
        counts = arrived.handle.counts_N.tolist()
        return arrived.rows_RD, arrived.handle.ids_RK, arrived.weights_RK, counts, new, object()

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: object = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, object]:
        """Return the sums, those of the weights and an event."""
        assert not config
        assert not previous_event
        assert not async_finish
        assert not allocate_on_comm_stream
        assert x.dtype == torch.bfloat16, "Unsupported type"
        self._require_rows(x)
        known, *rest = handle
        assert len(rest) == 5
        if known.rows != len(x):
            raise RuntimeError("Assertion failed: src_idx.size(0) == num_tokens")
        if topk_weights is not None:
            _require(topk_weights, 2, torch.float32)
            assert len(topk_weights) == len(x)
        y_TD, weights_TK = self._exchange(known).combine(x, known, topk_weights)
        if isinstance(bias, tuple):
            assert len(bias) == 2
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        for bias_TD in biases:
            _require(bias_TD, 2, x.dtype)
            assert bias_TD.shape == y_TD.shape
            y_TD = y_TD + bias_TD
        return y_TD, weights_TK, object()

    def _exchange(self, known: Handle) -> TokenExchange:
        return TokenExchange(self.group, self.group_size * len(known.counts_N))

    def _require_rows(self, x: Tensor) -> None:
        assert self in Buffer.alive, "the buffer was destroyed"
        _require(x, 2)
        assert x.shape[1] * x.element_size() % 32 == 0, "hidden_int4 % 2 == 0"

    def _require_layout(self, ids_TK: Tensor, per_rank_W: Tensor, per_expert_E: Tensor, in_rank_TW: Tensor) -> None:
        for given, dims, dtype in ((per_rank_W, 1, torch.int32), (per_expert_E, 1, torch.int32)):
            _require(given, dims, dtype)
        _require(in_rank_TW, 2, torch.bool)
        own = self.get_dispatch_layout(ids_TK, len(per_expert_E))
        assert torch.equal(own[0], per_rank_W)
        assert torch.equal(own[2], per_expert_E)
        assert torch.equal(own[3], in_rank_TW)


def _require(tensor: Tensor, dims: int, dtype: torch.dtype | None = None) -> None:
    assert tensor.dim() == dims, f"{tensor.dim()} dimensions, not {dims}"
    assert tensor.is_contiguous(), "is_contiguous()"
    assert dtype is None or tensor.dtype == dtype, f"{tensor.dtype}, not {dtype}"


class DeepEPStandIn(DeepEP):
    """The adapter over this module."""

    name: ClassVar[str] = "deep-ep-stand-in"

    def versions(self) -> dict[str, str]:
        """Return the version of torch."""
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> tuple[Limit, ...]:
        """Return none: no GPU is needed."""
        del variant
        return ()

    def library(self) -> Any:
        """Return this module."""
        import self_tests.backends.stand_in_deep_ep as module

        return module
