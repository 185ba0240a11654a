"""Put stand-ins in the place of the kernels that Megatron-Core's flex dispatcher calls, and take them out again.

The library looks for the kernels when `fused_a2a` is imported. A second instance of that module is executed while
imports find the stand-ins, and its functions replace those of the first in `token_dispatcher`. The rest of
the process sees neither.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.megatron_core import library
from moe_conformance.stand_ins import NOTE, deep_ep, elastic, events, hybrid_ep, nccl_ep
from moe_conformance.stand_ins.presenting import Namespace, loaded_with, module

SAID = {
    "deep_ep": f"{NOTE}; rows of any floating type",
    "transformer_engine.pytorch.ep": f"{NOTE}; rows of any floating type",
}


def kernel_modules() -> Mapping[str, ModuleType | None]:
    """Return the modules by the names that the library imports."""
    of_events = {"EventHandle": events.EventHandle, "EventOverlap": events.EventOverlap}
    buffers = {
        "Buffer": deep_ep.WideBuffer,  # 1.x, and 2.x as its legacy buffer
        "HybridEPBuffer": hybrid_ep.WideHybridEPBuffer,  # of the branch hybrid-ep
        "ElasticBuffer": elastic.WideElasticBuffer,  # 2.x
    }
    te = module("transformer_engine.pytorch", ep=nccl_ep.WideNcclEp())
    return {
        "deep_ep": module("deep_ep", **buffers, **of_events),
        "deep_ep.utils": module("deep_ep.utils", **of_events),
        "transformer_engine": module("transformer_engine", pytorch=te),
        "transformer_engine.pytorch": te,
    }


class Kernels:
    """The stand-ins in place, until `remove`."""

    def __init__(self) -> None:
        """Execute the module again and replace its functions."""
        original = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
        self.fused = loaded_with(original, kernel_modules())
        self.fused.torch = original.torch  # type: ignore[attr-defined]
        dispatcher = library.token_dispatcher
        shared = [name for name in vars(original) if name in vars(dispatcher) and _same(name, original, dispatcher)]
        self._before: dict[str, Any] = {name: getattr(dispatcher, name) for name in (*shared, "torch")}
        self._after: dict[str, Any] = {name: getattr(self.fused, name) for name in shared}
        # Managers allocate flags on "cuda".
        self._after["torch"] = Namespace(dispatcher.torch, zeros=_on_cpu(torch.zeros))
        self._put(self._after)

    def forget(self) -> None:
        """End the process-wide context of NCCL EP: a process has one model, and the next exchange is another one's."""
        finalize = getattr(self.fused, "nccl_ep_finalize", None)
        if finalize is not None:
            finalize()

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Take the stand-ins out for a while."""
        self.remove()
        try:
            yield
        finally:
            self._put(self._after)

    def remove(self) -> None:
        """Put back what was there."""
        self._put(self._before)

    def _put(self, values: Mapping[str, Any]) -> None:
        vars(library.token_dispatcher).update(values)


def _same(name: str, original: ModuleType, dispatcher: ModuleType) -> bool:
    """Whether the dispatcher has the name from that module: a function of it, or None where its kernel is missing."""
    value = getattr(dispatcher, name)
    return value is getattr(original, name) and (value is None or getattr(value, "__module__", "") == original.__name__)


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*sizes: Any, device: Any = None, **how: Any) -> Tensor:
        return make(*sizes, device="cpu" if device == "cuda" else device, **how)

    return made
