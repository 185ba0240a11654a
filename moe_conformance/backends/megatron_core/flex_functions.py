"""The functions below the flex dispatcher, by themselves: its token exchange, its buffers, and what lacks a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core.config_rules import ConfigRules
from moe_conformance.backends.megatron_core.flex_kernels import SAID, Kernels
from moe_conformance.contract import Config, Received, Settings, Topology, Unsupported
from moe_conformance.stand_ins.presenting import Namespace


@dataclass(frozen=True)
class Handle:
    """The kernel's handle, with what is returned of a layout the first time only."""

    raw: Any
    ids_RK: Tensor
    counts_N: Tensor


class TokenExchange:
    """`fused_dispatch` and `fused_combine`; the backward of each calls the other kernel, with the same handle."""

    def __init__(self, kernels: Kernels, group: Any, experts: int, local_experts: tuple[int, ...]) -> None:
        """Take the functions and the library's group."""
        self._fused, self._group, self._experts = kernels.fused, group, experts
        self.local_experts = local_experts
        again = "the backward of FusedCombine; its own backward: the adapter's"
        self.resolved: Mapping[str, str] = {
            "token_exchange": "fused_dispatch, fused_combine",
            "dispatch by handle": again,
            **SAID,
        }

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Handle | None = None,
    ) -> Received:
        """Dispatch as the manager does; it always sends weights: zeros where the caller has none."""
        if ids_TK is None:
            assert handle is not None  # the contract: ids, or a handle
            rows_RD = _Again.apply(x_TD, self._fused, self._group, handle.raw)  # type: ignore[no-untyped-call]
            return Received(rows_RD, handle.ids_RK, None, handle.counts_N, handle)
        sent_TK = torch.zeros(ids_TK.shape) if weights_TK is None else weights_TK
        rows_RD, ids_RK, weights_RK, counts_N, raw = self._fused.fused_dispatch(
            x_TD, ids_TK, sent_TK, self._experts, self._group, async_finish=True, allocate_on_comm_stream=True
        )
        known = Handle(raw, ids_RK, counts_N)
        return Received(rows_RD, ids_RK, None if weights_TK is None else weights_RK, counts_N, known)

    def combine(self, rows_RD: Tensor, handle: Handle) -> Tensor:
        """Combine as the manager does; there is no parameter for biases."""
        y_TD: Tensor = self._fused.fused_combine(
            rows_RD, self._group, handle.raw, async_finish=True, allocate_on_comm_stream=True
        )[0]
        return y_TD


class _Again(torch.autograd.Function):
    """Dispatches by a handle as the backward of the library's combine does; backward is the combine."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, fused: Any, group: Any, raw: Any) -> Any:
        ctx.fused, ctx.group, ctx.raw = fused, group, raw
        known = SimpleNamespace(handle=raw, group=group, async_finish=True, allocate_on_comm_stream=True)
        return fused.FusedCombine.backward(known, x_TD)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, None, None, None]:
        combine = ctx.fused.FusedCombine.forward
        return (
            combine(SimpleNamespace(), gradients[0].contiguous(), ctx.group, ctx.raw, True, True)[0],
            None,
            None,
            None,
        )


class _Sizes:
    """The tuning of a kernel, which notes whether it is asked for the size of an RDMA buffer."""

    asked = False

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 128

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        self.asked = True
        return 128


class _Members:
    """A group of a number of ranks, none of which is here."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks


class Transport:
    """Whether `get_buffer` asks for an RDMA buffer; the size that it gets is the kernel's."""

    resolved: Mapping[str, str] = {"transport": "get_buffer", **SAID}

    def __init__(self, kernels: Kernels) -> None:
        """Take the function, if it decides anything."""
        self._fused = kernels.fused
        if not self.is_local((0, 1), ("one", "one"), visible_devices=8):
            raise Unsupported("this version asks for an RDMA buffer always: DeepEP decides whether there is one")

    def is_local(self, members: Sequence[int], domain_of: Sequence[str], visible_devices: int) -> bool:
        """Let the library make the buffer of a group, in a process that sees so many devices."""
        del domain_of  # which the library does not ask for
        sizes = _Sizes()

        class Buffer:
            def __init__(self, group: object, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
                self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

            get_dispatch_config = get_combine_config = staticmethod(lambda ranks: sizes)

        before = {name: getattr(self._fused, name) for name in ("Buffer", "torch", "_buffer")}
        cuda = Namespace(torch.cuda, device_count=lambda: visible_devices)
        try:
            vars(self._fused).update(Buffer=Buffer, torch=Namespace(torch, cuda=cuda), _buffer=None)
            self._fused.get_buffer(_Members(len(members)), 64)
        finally:
            vars(self._fused).update(before)
        return not sizes.asked


class KernelRules(ConfigRules):
    """Settings that name a kernel: with the stand-ins in place, or without them."""

    def __init__(self, config: Config, topology: Topology, device: torch.device, kernels: Kernels) -> None:
        """Take the stand-ins."""
        super().__init__(config, topology, device)
        self._kernels = kernels

    @property
    def resolved(self) -> Mapping[str, str]:
        """What is built, over which kernels."""
        return {**super().resolved, **SAID}

    def resolve(self, asked: Settings) -> Settings:
        """Resolve where a kernel is named; an absent one is one without its stand-in."""
        if asked.kernel is None or asked.dispatcher != "fused":
            raise Unsupported("settings of other dispatchers are judged of the backend megatron-core")
        if asked.kernel == "absent":
            with self._kernels.absent():
                return super().resolve(asked)
        return super().resolve(asked)
