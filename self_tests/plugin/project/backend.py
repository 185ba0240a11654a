"""Native's all-to-all under several names, each of which ends in another verdict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, LocalExchange
from moe_conformance.contract import Config, Delivery, Limit, Routing, Unsupported, refusals


class Doubled(AllToAllExchange):
    """Weighs twice."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return twice what is right."""
        return 2 * super().combine(rows, handle)


class Raising(AllToAllExchange):
    """Raises on one rank."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Raise where the others go on."""
        if self.topology.rank == 0:
            raise ZeroDivisionError("the toy is broken")
        return super().dispatch(x, routing)


class Refusing(AllToAllExchange):
    """Raises on every rank."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Raise for the dtype."""
        raise TypeError(f"the toy does not take {x.dtype}")


class Stumbling(AllToAllExchange):
    """Has a mistake in its code."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Ask for what is not there."""
        return super().dispatch(x, routing.renamed)  # type: ignore[attr-defined]


class Waiting(AllToAllExchange):
    """Waits on one rank for the others, which do not come."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Ask for a collective too many."""
        if self.topology.rank == 1:
            dist.barrier()
        return super().dispatch(x, routing)


class Moody(AllToAllExchange):
    """Is wrong on the first ranks that it ever runs on, and right on those that replace them."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return twice what is right."""
        first = Path(os.environ["MOODY"])
        if not first.exists():
            first.write_text(str(os.getpid()))
        return (2 if first.read_text() == str(os.getpid()) else 1) * super().combine(rows, handle)


class Unlucky(AllToAllExchange):
    """Meets a fault of the machine."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Raise what CUDA would."""
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


EXCHANGES = {
    "wrong": Doubled,
    "raises": Raising,
    "proves_late": Refusing,
    "stumbles": Stumbling,
    "waits": Waiting,
    "moody": Moody,
    "unlucky": Unlucky,
}
REFUSALS = {"refuses": "library", "proves": "library", "unadapted": "adapter"}
UNPROVED = Limit("dtype", (torch.float64,), "float64 only, or the device hangs", proof="undefined")
PROVED = Limit("dtype", (torch.float64,), "float64 only", proof="refused")


def _like(variant: str) -> None:
    """Refuse, as the toy's library."""
    if variant in REFUSALS:
        raise ValueError("the toy does not like it")


class ToySession(NativeSession):
    """Builds what the variant says."""

    def exchange(self, config: Config) -> LocalExchange:
        """Build, or refuse."""
        if REFUSALS.get(config.variant) == "adapter":
            raise Unsupported("the toy does not like it")
        with refusals(ValueError, match="does not like"):
            _like(config.variant)
        return EXCHANGES.get(config.variant, AllToAllExchange)(replace(config, variant="alltoall"), self.topology)


class Toy(Native):
    """The backend of this project."""

    name = "toy"
    variants = (
        *("right", "wrong", "raises", "waits", "refuses", "unadapted"),
        *("limited", "proves", "proves_late", "stumbles", "boasts"),
    )
    session_class = ToySession
    library_modules = (__name__,)

    def limits(self, variant: str) -> Sequence[Limit]:
        """Return what the variants declare; one of them boasts."""
        proved = dict.fromkeys(("proves", "proves_late", "stumbles", "boasts"), (PROVED,))
        return {"limited": (UNPROVED,), **proved}.get(variant, ())


class RightToy(Toy):
    """A toy without fault."""

    variants = ("right", "refuses")  # type: ignore[assignment]


class MoodyToy(Toy):
    """A toy with faults that are not its own, or do not stay."""

    variants = ("moody", "unlucky", "wrong")  # type: ignore[assignment]


class NeedyToy(Toy):
    """A toy whose library is not installed."""

    def versions(self) -> dict[str, str]:
        """Refuse."""
        raise Unsupported("toylib is not installed: pip install toylib")


class UnpreloadableToy(Toy):
    """A toy whose library breaks when the ranks' parent imports it."""

    preload = ("self_tests.plugin.project.no_such_module",)
