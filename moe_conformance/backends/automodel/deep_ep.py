"""Automodel's flex dispatcher over stand-ins for the kernels of DeepEP and HybridEP; only its exchange is adapted.

All else is that of Automodel, which has a backend of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.backends.automodel.backend import Automodel
from moe_conformance.contract import Claims, Config, Delivery, Limit, Routing, Session, Topology, Unsupported
from moe_conformance.stand_ins import NOTE, deep_ep, events, hybrid_ep
from moe_conformance.stand_ins.presenting import Namespace, loaded_with, module

_PACKAGE = "nemo_automodel.components.moe.megatron"
_SAID = {"deep_ep": f"{NOTE}; rows of any floating type"}
_STATE = "the manager keeps the handle and the probabilities of the last dispatch on itself"
_FLOAT32 = "weights are sent as float32, which is all that the kernels take"
_MAP = "rows are marked in a map (T, E), in which a token has an expert once or not at all"
_ALIGNMENT = 4  # of HybridEP, which cannot be set


class AutomodelDeepEP(Automodel):
    """The flex dispatcher with each of two kernels."""

    name: ClassVar[str] = "automodel-deep-ep"
    variants: ClassVar[tuple[str, ...]] = ("deepep", "hybridep")
    sampled: ClassVar[tuple[str, ...]] = ()
    process_per_rank: ClassVar[bool] = True  # buffers are of the process
    preload: ClassVar[tuple[str, ...]] = (f"{_PACKAGE}.token_dispatcher",)

    def limits(self, variant: str) -> Sequence[Limit]:
        """Those of Automodel, and of the dispatcher."""
        floats = (torch.float32, torch.bfloat16, torch.float16)
        return (
            *super().limits(variant),
            Limit("halves_in_flight", (1,), _STATE, proof="undefined"),
            Limit("dtype", floats, _FLOAT32, proof="undefined"),
            Limit("duplicate_experts", (False,), _MAP, proof="undefined"),
        )

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session with the stand-ins in place."""
        self.versions()
        if device.type != "cpu":
            raise Unsupported("the stand-ins are for CPU ranks")
        return _Session(topology)


class _Session(Session):
    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._dispatcher = importlib.import_module(f"{_PACKAGE}.token_dispatcher")
        original = importlib.import_module(f"{_PACKAGE}.fused_a2a")
        self._fused: Any = loaded_with(original, _kernels())
        cuda = Namespace(torch.cuda, synchronize=lambda device: None)  # after the first dispatch, to tell the time
        vars(self._fused)["torch"] = Namespace(torch, cuda=cuda)
        names = [name for name in vars(original) if name in vars(self._dispatcher) and not name.startswith("_")]
        self._before = {name: getattr(self._dispatcher, name) for name in names}
        vars(self._dispatcher).update({name: getattr(self._fused, name) for name in names})

    def exchange(self, config: Config) -> FlexExchange:
        """Build a dispatcher that shares its manager with no other one."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "padding.packed")
        group = self._topology.group("ep")
        if self._topology.sizes["etp"] > 1:
            raise Unsupported("Automodel's dispatcher says `TP is not used`")
        if config.experts < 1 or config.experts % group.size():
            raise Unsupported("every rank has the same number of experts")
        if group.size() == 1:
            raise Unsupported("Flex token dispatcher requires TPxEP > 1")
        held = config.experts // group.size()
        first = held * group.rank()
        built = self._dispatcher.MoEFlexTokenDispatcher(
            held,
            list(range(first, first + held)),
            self._dispatcher.TokenDispatcherConfig(
                moe_router_topk=config.top_k,
                num_moe_experts=config.experts,
                moe_flex_dispatcher_backend=config.variant,
                moe_share_token_dispatcher=False,
                moe_deepep_async_dispatch=True,
            ),
            group,
        )
        return FlexExchange(built, tuple(range(first, first + held)), config.variant == "hybridep")

    def close(self) -> None:
        """Take the stand-ins out."""
        vars(self._dispatcher).update(self._before)


class FlexExchange:
    """A dispatcher, whose state is on its manager: the handle is the shape of x."""

    def __init__(self, dispatcher: Any, local_experts: tuple[int, ...], pads: bool) -> None:
        """Take the dispatcher, and whether it pads token counts."""
        self._dispatcher, self._pads, self.local_experts = dispatcher, pads, local_experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The dispatcher and its manager, and that the kernel is a stand-in."""
        manager = type(self._dispatcher._comm_manager).__qualname__
        return {"dispatcher": type(self._dispatcher).__qualname__, "manager": manager, **_SAID}

    @property
    def claims(self) -> Claims:
        """Tokens are sent once to a rank, weights applied by the experts; HybridEP's tokens are padded."""
        if self._pads:
            return Claims(wire="tokens", weights_at="expert", padding="group_max", alignment=_ALIGNMENT)
        return Claims(wire="tokens", weights_at="expert")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, torch.Size]:
        """Send rows to their experts."""
        x_TD = x.reshape(-1, x.shape[-1])
        rows_RD, counts_N, weights_R = self._dispatcher.token_permutation2(
            x_TD, len(x_TD), routing.weights_TK, routing.ids_TK
        )
        return Delivery.grouped(rows_RD, counts_N, weights_R), x.shape

    def combine(self, rows: Tensor, handle: torch.Size) -> Tensor:
        """Return the sums."""
        y_TD: Tensor = self._dispatcher.token_unpermutation(rows)
        return y_TD.reshape(handle)


def _kernels() -> Mapping[str, Any]:
    """Return the modules by the names that the library imports."""
    of_events = {"EventHandle": events.EventHandle, "EventOverlap": events.EventOverlap}
    buffers = {"Buffer": deep_ep.WideBuffer, "HybridEPBuffer": hybrid_ep.WideHybridEPBuffer}
    return {
        "deep_ep": module("deep_ep", **buffers, **of_events),
        "deep_ep.utils": module("deep_ep.utils", **of_events),
    }
