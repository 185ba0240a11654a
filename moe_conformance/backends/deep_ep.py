"""DeepEP: the normal kernels of its `Buffer` as a token exchange.

Written from the source and docs/legacy.md of deepseek-ai/DeepEP (main at dd758ca, 2.1.0), and never run on its kernels
by this project: moe_conformance/stand_ins/deep_ep.py stands in their place there. What is read off the source:

* rows are bfloat16 (combine knows no other type), of a multiple of 16 columns (TMA takes halves of 16 bytes);
* a rank is asked for its layout first, and hands that over with its tokens; ids are `topk_idx_t`, weights float32, and
  neither is sent without the other, so that zeros are sent where the suite passes no weights;
* ids come back as local ones, -1 for other ranks' slots; counts come as a list;
* a dispatch with a handle takes neither ids nor weights and returns rows alone;
* the backward of dispatch is a combine and the backward of combine a dispatch, with the same handle: the caller's part;
* combine adds up to two biases.

T tokens of this rank, K slots, E experts, N experts held, D hidden, W ranks of the group, R rows received.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.contract import Config, Limit, Received, Session, Topology, Unsupported, refusals

_INSTALL = "it is built on a machine with GPUs, from github.com/deepseek-ai/DeepEP; see docs/token_exchange.md"


class DeepEP:
    """The kernels of DeepEP, on GPUs that NVLink or RDMA connects."""

    name: ClassVar[str] = "deep-ep"
    variants: ClassVar[tuple[str, ...]] = ("normal",)

    def versions(self) -> Mapping[str, str]:
        """Versions of DeepEP and torch."""
        if find_spec("deep_ep") is None:
            raise Unsupported(f"deep_ep is not installed: {_INSTALL}")
        return {"deep_ep": version("deep_ep"), "torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        """The kernels are CUDA's, and experts are whole."""
        del variant
        return (
            Limit("sharded_experts", (False,), "DeepEP knows of no shards of an expert", proof="design"),
            Limit("device", ("cuda",), "the buffer is CUDA memory that other GPUs map", proof="undefined"),
        )

    def library(self) -> Any:
        """Import DeepEP, which loads its kernels."""
        return importlib.import_module("deep_ep")

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session; no buffer is made yet."""
        return _Session(self.library(), topology)


class _Session(Session):
    def __init__(self, library: Any, topology: Topology) -> None:
        self._library, self._topology = library, topology
        self._buffers: list[Any] = []

    def token_exchange(self, config: Config) -> TokenExchange:
        """Make a buffer of the size that the library recommends; collective."""
        config.only("variant", "experts", "top_k", "hidden", "dtype")
        if config.dtype != torch.bfloat16:
            raise Unsupported(f"DeepEP combines rows of torch.bfloat16 only, not of {config.dtype}")
        if config.hidden % 16:
            raise Unsupported(f"DeepEP copies rows of a multiple of 16 columns, not of {config.hidden}")
        if self._topology.sizes["etp"] > 1:
            raise Unsupported(f"DeepEP knows of no shards of an expert: etp = {self._topology.sizes['etp']}")
        group = self._topology.group("ep_etp")
        if config.experts % group.size():
            raise Unsupported(f"DeepEP holds as many experts on every rank: {config.experts} on {group.size()}")
        buffer_class = self._library.Buffer
        with refusals(AssertionError, match="Unsupported number of EP ranks"):
            configs = (buffer_class.get_dispatch_config(group.size()), buffer_class.get_combine_config(group.size()))
        row_bytes = config.hidden * 2
        buffer = buffer_class(
            group,
            max(sizes.get_nvl_buffer_size_hint(row_bytes, group.size()) for sizes in configs),
            max(sizes.get_rdma_buffer_size_hint(row_bytes, group.size()) for sizes in configs),
            explicitly_destroy=True,
        )
        self._buffers.append(buffer)
        held = config.experts // group.size()
        first = held * self._topology.ranks("ep_etp").index(self._topology.rank)
        return TokenExchange(buffer, config.experts, tuple(range(first, first + held)))

    def close(self) -> None:
        """Free the buffers."""
        while self._buffers:
            self._buffers.pop().destroy()


@dataclass(frozen=True)
class Handle:
    """The library's handle, with what it returns of a layout the first time only."""

    raw: Any
    ids_RK: Tensor
    counts_N: Tensor


class TokenExchange:
    """`Buffer.dispatch` and `Buffer.combine`, each the backward of the other."""

    def __init__(self, buffer: Any, experts: int, local_experts: tuple[int, ...]) -> None:
        """Take the buffer of the group."""
        self._buffer, self._experts = buffer, experts
        self.local_experts = local_experts
        built = f"{type(buffer).__module__}.{type(buffer).__name__}"
        self.resolved: Mapping[str, str] = {"token_exchange": built, "backward": "the adapter's"}

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Handle | None = None,
    ) -> Received:
        """Lay out and send, or send by a handle."""
        if ids_TK is None:
            assert handle is not None  # the contract: ids, or a handle
            rows_RD = _Again.apply(x_TD, self._buffer, handle.raw)  # type: ignore[no-untyped-call]
            return Received(rows_RD, handle.ids_RK, None, handle.counts_N, handle)
        sent_TK = torch.zeros(ids_TK.shape, device=ids_TK.device) if weights_TK is None else weights_TK
        rows_RD, weights_RK, ids_RK, counts, raw = _Dispatch.apply(  # type: ignore[no-untyped-call]
            x_TD, sent_TK, ids_TK, self._buffer, self._experts
        )
        known = Handle(raw, ids_RK, torch.tensor(counts, dtype=torch.int64))
        return Received(rows_RD, ids_RK, None if weights_TK is None else weights_RK, known.counts_N, known)

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        """Add up, the library's way: it takes one bias as a tensor and two as a tuple."""
        y_TD: Tensor = _Combine.apply(rows_RD, self._buffer, handle.raw, *biases)  # type: ignore[no-untyped-call]
        return y_TD


class _Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, buffer: Any, experts: int
    ) -> tuple[Any, ...]:
        per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids_TK, experts)
        rows_RD, ids_RK, weights_RK, counts, handle, _ = buffer.dispatch(
            x_TD,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(ids_RK)
        return rows_RD, weights_RK, ids_RK, counts, handle

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None, None]:
        rows_RD, weights_RK = (gradient.contiguous() for gradient in gradients[:2])
        dx_TD, dweights_TK, _ = ctx.buffer.combine(rows_RD, ctx.handle, topk_weights=weights_RK)
        return dx_TD, dweights_TK, None, None, None


class _Again(torch.autograd.Function):
    """Dispatches tokens again by the handle of an earlier dispatch."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, buffer: Any, handle: Any) -> Any:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.dispatch(x_TD, handle=handle)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.combine(gradients[0].contiguous(), ctx.handle)[0], None, None


class _Combine(torch.autograd.Function):
    """Rows back to their tokens, onto the biases."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, buffer: Any, handle: Any, *biases: Tensor) -> Any:
        ctx.buffer, ctx.handle, ctx.biases = buffer, handle, len(biases)
        bias = biases or None
        return buffer.combine(rows_RD, handle, bias=biases[0] if len(biases) == 1 else bias)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        upstream_TD = gradients[0].contiguous()
        rows_RD = ctx.buffer.dispatch(upstream_TD, handle=ctx.handle)[0]
        return rows_RD, None, None, *(upstream_TD for _ in range(ctx.biases))
