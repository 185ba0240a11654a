"""torchtitan's DeepEP and HybridEP dispatchers, over stand-ins for the kernels; only their exchange is adapted here.

All else is that of torchtitan, which has a backend of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from moe_conformance.backends.torchtitan.backend import TorchTitan
from moe_conformance.backends.torchtitan.exchange import Exchange, placement
from moe_conformance.contract import Claims, Config, Limit, Session, Topology, Unsupported, refusals
from moe_conformance.stand_ins import NOTE, deep_ep, elastic, events, hybrid_ep
from moe_conformance.stand_ins.presenting import module, presented

_SAID = {"deep_ep": f"{NOTE}; rows of any floating type"}
_EVEN = "`MoE pads the sequence before routing, so x_TD.shape[0] is the common current token count across ranks`"
_MASKED = "`Mask out zero-score selections (DeepEP uses -1 for no selection)`"
_FLOAT32 = "scores are sent as float32, which is all that the kernels take"
_BOUND = 8192  # the tokens that a trainer would announce


class TitanDeepEP(TorchTitan):
    """The two dispatchers that call kernels."""

    name: ClassVar[str] = "torchtitan-deep-ep"
    variants: ClassVar[tuple[str, ...]] = ("deepep", "hybridep")
    process_per_rank: ClassVar[bool] = True  # buffers and operators are of the process
    preload: ClassVar[tuple[str, ...]] = ("torchtitan.models.common.token_dispatcher",)

    def limits(self, variant: str) -> Sequence[Limit]:
        """Those of all its dispatchers, and that ranks have equally many tokens."""
        limits = (
            Limit("uneven_tokens", (False,), _EVEN, proof="undefined"),
            Limit("dtype", (torch.float32, torch.bfloat16, torch.float16), _FLOAT32, proof="undefined"),
        )
        zero = (Limit("zero_weights", (False,), _MASKED, proof="undefined"),) if variant == "deepep" else ()
        twice = "the map (T, E) of HybridEP has an expert once in a token"
        once = (Limit("duplicate_experts", (False,), twice, proof="undefined"),) if variant == "hybridep" else ()
        return (*super().limits(variant), *limits, *zero, *once)

    def open(self, topology: Topology, device: torch.device) -> Session:
        """Open a session with the stand-ins in place."""
        self.versions()
        if device.type != "cpu":
            raise Unsupported("the stand-ins are for CPU ranks")
        return _Session(topology, device)


class _Session(Session):
    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._topology, self._device = topology, device
        self._presented = ExitStack()
        self._presented.enter_context(presented(_kernels()))

    def exchange(self, config: Config) -> DeepEPExchange:
        """Build a dispatcher and wire it to this rank's ep group."""
        config.only("variant", "experts", "top_k", "hidden", "ffn", "dtype")
        first, held = placement(self._topology, config)
        group = self._topology.group("ep")
        if group.size() == 1:
            raise Unsupported("torchtitan takes the local dispatcher where ep = 1")
        from torchtitan.models.common import token_dispatcher

        names = {"deepep": "DeepEPTokenDispatcher", "hybridep": "HybridEPTokenDispatcher"}
        chosen = getattr(token_dispatcher, names[config.variant])
        asked = chosen.Config(
            num_experts=config.experts, top_k=config.top_k, hidden_dim=config.hidden, num_max_tokens_per_rank=_BOUND
        )
        with refusals(ImportError, match="from 'torch._library.opaque_object'"):  # of another torch
            built = asked.build()
        _on_cpu(config.variant)
        built.wire_meshes(ep_mesh=DeviceMesh.from_group(group, self._device.type, mesh_dim_names=("ep",)))
        return DeepEPExchange(built, range(first, first + held))

    def close(self) -> None:
        """Take the stand-ins out."""
        self._presented.close()


class DeepEPExchange(Exchange):
    """A dispatcher over a kernel."""

    @property
    def resolved(self) -> Mapping[str, str]:
        """The dispatcher, and that the kernel is a stand-in."""
        return {**super().resolved, "path": "kernels", **_SAID}

    @property
    def claims(self) -> Claims:
        """A token is sent once to a rank."""
        return Claims(wire="tokens")


def _kernels() -> Mapping[str, Any]:
    """Return the modules by the names that the library imports, also while it runs."""
    hybrid = module(
        "deep_ep.hybrid_ep_buffer",
        indices_to_map=hybrid_ep.indices_to_map,
        HybridEPBuffer=hybrid_ep.WideHybridEPBuffer,
    )
    package = module(
        "deep_ep",
        Buffer=deep_ep.WideBuffer,
        ElasticBuffer=elastic.WideElasticBuffer,
        HybridEPBuffer=hybrid_ep.WideHybridEPBuffer,
        EventOverlap=events.EventOverlap,
        hybrid_ep_buffer=hybrid,
    )
    return {"deep_ep": package, "deep_ep.hybrid_ep_buffer": hybrid}


def _on_cpu(variant: str) -> None:
    """Register the library's own operators, which are CUDA's, for the CPU too, once in a process."""
    if variant == "deepep":
        from torchtitan.distributed.deepep import deepep

        if not torch._C._dispatch_has_kernel_for_dispatch_key("deepep::dispatch", "CPU"):
            deepep._lib.impl("dispatch", deepep._dispatch_op_impl, "CPU")
            deepep._lib.impl("combine", deepep._combine_op_impl, "CPU")
        return
    from torchtitan.distributed.deepep import hybridep

    for operator in (
        hybridep._dispatch_impl,
        hybridep._combine_impl,
        hybridep._dispatch_bwd_impl,
        hybridep._combine_bwd_impl,
    ):
        if "cpu" not in operator._backend_fns:
            operator.register_kernel("cpu")(operator._init_fn)
