"""AutoEP's transport `deepep`, over a stand-in for the kernels of DeepEP 2; only its exchange is adapted here.

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
from moe_conformance.contract import Config, Limit, Session, Topology, Unsupported
from moe_conformance.stand_ins import NOTE, deep_ep, elastic
from moe_conformance.stand_ins.presenting import Namespace, module, presented

if TYPE_CHECKING:
    from moe_conformance.backends.deepspeed.autoep import AutoEPExchange

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
    def __init__(self, topology: Topology, device: torch.device) -> None:
        from moe_conformance.backends.deepspeed import library
        from moe_conformance.backends.deepspeed.session import DeepSpeedSession

        self._library, self._device = library, device
        self._plain = DeepSpeedSession(topology, device)
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
        from moe_conformance.backends.deepspeed.autoep import AutoEPExchange

        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied", "padding.packed")
        placement = self._plain.placement
        if self._library.auto_ep_comm is None:
            raise Unsupported("this version of DeepSpeed has no transport `deepep`")
        if placement.topology.sizes["tp"] > 1:
            raise Unsupported("the library refuses the transport `deepep` where AutoEP folds tensor parallelism")
        if placement.ep == 1:
            raise Unsupported("with ep = 1 AutoEP sends nothing: see the variant autoep of deepspeed")
        settings = {"comm_backend": "deepep", "comm_max_tokens_per_rank": _BOUND}
        built = AutoEPExchange(config, placement, self._device, **settings)
        built.said = {"deep_ep": f"{NOTE}; rows of any floating type"}
        self._layers.append(built.layer)
        return built

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
