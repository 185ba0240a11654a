"""AutoEP's transport `deepep`, over a stand-in for the kernels of DeepEP 2: its exchange and its layer.

All else is that of DeepSpeed, which has a backend of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_conformance.backends.deepspeed.backend import DeepSpeed
from moe_conformance.contract import Config, Limit, Parametrised, Session, Topology, Unsupported
from moe_conformance.stand_ins import NOTE, deep_ep, elastic
from moe_conformance.stand_ins.presenting import Namespace, module, presented

if TYPE_CHECKING:
    from moe_conformance.backends.deepspeed.autoep import AutoEPExchange
    from moe_conformance.backends.deepspeed.autoep_model import AutoEPExperts, AutoEPLayer

_BOUND = 8192  # the tokens that a trainer would announce
# The library refuses what the kernels do not take; the stand-in takes these, so that the caller is judged exactly.
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class DeepSpeedDeepEP(DeepSpeed):
    """AutoEP's layer with rows that DeepEP moves, where the library has that."""

    name: ClassVar[str] = "deepspeed-deep-ep"
    variants: ClassVar[tuple[str, ...]] = ("deepep",)

    def limits(self, variant: str) -> Sequence[Limit]:
        """Those of AutoEP's other transport."""
        del variant
        return super().limits("autoep")

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session with the stand-in in place."""
        self.versions()
        if device.type != "cpu":
            raise Unsupported("the stand-in is for CPU ranks")
        return _Session(topology, device)


class _Session(Session):
    loss_convention = "mean_over_dp"

    def __init__(self, topology: Topology, device: torch.device) -> None:
        from moe_conformance.backends.deepspeed import library
        from moe_conformance.backends.deepspeed.autoep_session import AutoEPParts
        from moe_conformance.backends.deepspeed.session import DeepSpeedSession

        self._library = library
        self._plain = DeepSpeedSession(topology, device)
        settings = {"comm_backend": "deepep", "comm_max_tokens_per_rank": _BOUND}
        self._parts = AutoEPParts(self._plain.placement, device, self._plain.engine, **settings)
        self._layers = list[Any]()
        self._in_place = ExitStack()
        if library.auto_ep_comm is None:
            return
        package = module("deep_ep", ElasticBuffer=elastic.WideElasticBuffer, topk_idx_t=deep_ep.topk_idx_t)
        barrier = Namespace(library.auto_ep_layer.dist, barrier=_barrier)
        self._in_place.enter_context(presented({"deep_ep": package}))
        self._in_place.enter_context(patch.object(library.auto_ep_layer, "dist", barrier))
        self._in_place.enter_context(patch.object(library.auto_ep_comm, "SUPPORTED_DTYPES", _FLOATS))

    def exchange(self, config: Config) -> AutoEPExchange:
        """Build the layer around a given routing and given experts."""
        self._require_transport()
        built = self._parts.exchange(config)
        built.said = self._kept(built.layer)
        return built

    def experts(self, config: Config) -> AutoEPExperts:
        """Build the layer, and return its experts."""
        self._require_transport()
        return self._parts.experts(config)

    def layer(self, config: Config) -> AutoEPLayer:
        """Build the whole layer."""
        self._require_transport()
        built = self._parts.layer(config)
        built.said = self._kept(built.engine.module)
        return built

    def finish_gradients(self, *built: Parametrised) -> None:
        """Let the engine of every surface reduce gradients."""
        self._plain.finish_gradients(*built)

    def _kept(self, layer: Any) -> dict[str, str]:
        """Keep a layer, whose buffer is freed at the end, and return what is to be said of it."""
        self._layers.append(layer)
        return {"deep_ep": f"{NOTE}; rows of any floating type"}

    def _require_transport(self) -> None:
        placement = self._plain.placement
        if self._library.auto_ep_comm is None:
            raise Unsupported("this version of DeepSpeed has no transport `deepep`")
        if placement.topology.sizes["tp"] > 1:
            raise Unsupported("the library refuses the transport `deepep` where AutoEP folds tensor parallelism")
        if placement.ep == 1:
            raise Unsupported("with ep = 1 AutoEP sends nothing: see the variant autoep of deepspeed")

    def close(self) -> None:
        """Free the buffers, take the stand-in out, and close DeepSpeed's session."""
        for layer in self._layers:
            self._library.auto_ep_comm.destroy_exchanges(layer)
        self._in_place.close()
        self._plain.close()


def _barrier(*, group: ProcessGroup, device_ids: list[int | None]) -> None:
    """Wait for the group; devices are of NCCL's barrier."""
    del device_ids
    dist.barrier(group)
