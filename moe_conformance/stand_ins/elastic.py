"""DeepEP 2's `ElasticBuffer` as its source documents it: dispatch and combine, expanded or not, within one node.

From deep_ep/buffers/elastic.py of deepseek-ai/DeepEP, main at dd758ca (2.1.0). All ranks must hold the same
`num_max_tokens_per_rank`, in the constructor, which is collective, and in every dispatch. Float8, Engram and RDMA do
not stand in.

T tokens of this rank, K slots, E experts, N experts held, D hidden, R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.stand_ins.deep_ep import Buffer, Handle, WideBuffer
from moe_conformance.stand_ins.events import EventHandle, EventOverlap, begin
from moe_conformance.stand_ins.expanded import Expanded
from moe_conformance.stand_ins.rows import of_all_ranks

_ALIGNED = 2 << 20


@dataclass(frozen=True)
class EPHandle:
    """What combine and a cached dispatch need: here the parts that callers read, and two that they do not."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_expert: Tensor  # int32; expanded: where an expert's rows end, without its padding
    num_unaligned_recv_tokens_per_expert: Tensor
    layout: Handle
    expanded: Expanded


class ElasticBuffer:
    """The buffer of a group; the normal kernels of 1.x are inside of its stand-in."""

    inner_class: type[Buffer] = Buffer

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        """Allocate; collective."""
        assert not num_cpu_bytes
        assert not use_fp8_dispatch
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk)
        assert num_bytes % _ALIGNED == 0
        sizes = [size for (size,) in of_all_ranks([num_bytes], group)]
        if len(set(sizes)) > 1:
            raise RuntimeError(f"the ranks make elastic buffers of {sizes} bytes")
        self.group, self.num_bytes, self.num_max_tokens_per_rank = group, num_bytes, num_max_tokens_per_rank
        self.explicitly_destroy = explicitly_destroy
        self._inner = self.inner_class(group, explicitly_destroy=explicitly_destroy)
        self._dispatches = 0

    def destroy(self) -> None:
        """Free it; collective."""
        self._inner.destroy()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
    ) -> int:
        """Return bytes, a multiple of 2 MiB."""
        assert not use_fp8_dispatch
        needed = group.size() * num_max_tokens_per_rank * (2 * hidden + 12 * num_topk + 64)
        return -(-max(1, needed) // _ALIGNED) * _ALIGNED

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        """Return the number of multiprocessors that suits the links."""
        return 20

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of the current stream."""
        return EventHandle()

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Return rows, local ids, weights, the handle and an event; expanded: no ids, and weights (A,).

        A dispatch with a handle repeats its layout, expanded if this call says so again. It takes weights, or none.
        """
        assert do_expand or not do_zero_padding, "not do_zero_padding or do_expand"
        assert do_cpu_sync in (None, handle is None), "Cannot do CPU sync with cached handle"
        assert previous_event is None or allocate_on_comm_stream, "previous_event needs allocate_on_comm_stream"
        event = None if previous_event is None else EventOverlap(previous_event)
        end = begin(event, async_with_compute_stream, allocate_on_comm_stream)
        ids_RK: Tensor | None
        weights_RK: Tensor | None
        if handle is None:
            assert topk_idx is not None
            assert num_experts is not None
            most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            alignment = expert_alignment or 1
            rows_RD, ids_RK, weights_RK, counts, layout = self._dispatched(
                x, topk_idx, topk_weights, num_experts, most, alignment
            )
            handle = self._handle(do_expand, num_experts, alignment, most, num_sms, topk_idx, counts, layout)
        else:
            assert topk_idx is None
            rows_RD, ids_RK = self._inner.dispatch(x, handle.layout)[0], None
            weights_RK = None
            if topk_weights is not None:
                _, weights_RK = self._inner.slots(
                    handle.layout.sends, handle.layout.held, handle.topk_idx, topk_weights
                )
        if do_expand:
            K = handle.topk_idx.shape[1]
            rows_RD = handle.expanded.rows_of(rows_RD, K, zero_padding=do_zero_padding)
            ids_RK, weights_RK = None, None if weights_RK is None else handle.expanded.weights_of(weights_RK)
        return rows_RD, ids_RK, weights_RK, handle, end((rows_RD, ids_RK, weights_RK))

    def _dispatched(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, experts: int, most: int, alignment: int
    ) -> tuple[Tensor, Tensor, Tensor, list[int], Handle]:
        """Return rows, local ids, weights, counts and the layout of a dispatch without a handle."""
        self._inner.agreed = most
        assert len(x) <= most, "num_tokens <= num_max_tokens_per_rank"
        needed = self.get_buffer_size_hint(self.group, most, x.shape[1], topk_idx.shape[1])
        assert needed <= self.num_bytes, "the buffer is too small"
        per_rank_W, _, per_expert_E, in_rank_TW, _ = self._inner.get_dispatch_layout(topk_idx, experts)
        rows_RD, ids_RK, weights_RK, counts, layout, _ = self._inner.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=per_rank_W,
            num_tokens_per_expert=per_expert_E,
            is_token_in_rank=in_rank_TW,
            expert_alignment=alignment,
        )
        return rows_RD, ids_RK, weights_RK, counts, layout

    def _handle(
        self, do_expand: bool, experts: int, alignment: int, most: int, num_sms: int, topk_idx: Tensor,
        counts: list[int], layout: Handle,
    ) -> EPHandle:  # fmt: skip
        """Return the handle; every other dispatch of this buffer has its pairs backwards."""
        assert layout.ids_RK is not None
        self._dispatches += 1
        places = Expanded.of(layout.ids_RK, layout.held, alignment, backwards=self._dispatches % 2 == 0)
        ends_N = places.ends_N if do_expand else torch.tensor(counts).cumsum(0).int()
        return EPHandle(
            do_expand, experts, alignment, most, num_sms or 20, topk_idx.clone(), len(layout.ids_RK), places.rows,
            counts, ends_N, places.counts_N.int(), layout, places,
        )  # fmt: skip

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return the sums, those of the weights and an event; of an expanded handle rows are (A, D), weights (A,)."""
        assert previous_event is None or allocate_on_comm_stream, "previous_event needs allocate_on_comm_stream"
        event = None if previous_event is None else EventOverlap(previous_event)
        end = begin(event, async_with_compute_stream, allocate_on_comm_stream)
        if handle.do_expand:
            K = handle.topk_idx.shape[1]
            if topk_weights is not None:
                topk_weights = handle.expanded.slots_of(topk_weights, handle.num_recv_tokens, K)
            x = handle.expanded.summed(x, handle.num_recv_tokens, K)
        y_TD, weights_TK, _ = self._inner.combine(x, handle.layout, topk_weights, bias)
        return y_TD, weights_TK, end((y_TD, weights_TK))


class WideElasticBuffer(ElasticBuffer):
    """A buffer for rows of any floating type and width, which no kernel takes."""

    inner_class = WideBuffer
