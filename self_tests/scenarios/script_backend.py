"""A backend with one surface of its own, for scripts: it halves rows, keeps a handle, and refuses when told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Config, Limit, Routing, Session, Topology, Unsupported


@dataclass(frozen=True)
class Halved:
    """An answer with data, and with a handle that is none."""

    rows_RD: Tensor
    rank: int
    handle: object


class Halver:
    """Halves rows, and remembers in the handle what they were."""

    resolved: Mapping[str, str] = {"halver": "Halver"}

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def halve(self, rows_RD: Tensor) -> Halved:
        """Return half of every row."""
        return Halved(rows_RD / 2, self.group.rank(), {"whole": rows_RD, "lock": object()})

    def undo(self, halved_RD: Tensor, handle: dict[str, Tensor]) -> Tensor:
        """Return what was halved, and zero the argument: nobody should."""
        whole_RD = handle["whole"] + 0 * halved_RD.sum()
        if not halved_RD.requires_grad:
            halved_RD.zero_()
        return whole_RD

    def total(self, routing: Routing) -> Tensor:
        """Return the sum of the weights over all ranks."""
        total = routing.weights_TK.detach().sum()
        dist.all_reduce(total, group=self.group)
        return total + 0 * routing.weights_TK.sum()

    def unwritten(self, numbers: int) -> Tensor:
        """Return memory that nobody has written."""
        return torch.empty(numbers)

    def rest(self, rows_RD: Tensor, first: int) -> Tensor:
        """Return the argument itself, or all of it but the first rows: a view."""
        return rows_RD[first:] if first else rows_RD

    def refuse(self, on: tuple[int, ...]) -> str:
        """Raise on some ranks."""
        if self.group.rank() in on:
            raise ValueError(f"rank {self.group.rank()} refuses")
        return "done"


class HalverSession(Session):
    """Builds it."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def halver(self, config: Config) -> Halver:
        """Build a halver; top-1 only."""
        if config.top_k != 1:
            raise Unsupported(f"top_k = {config.top_k}: this halves one row at a time")
        return Halver(self.topology.group("world"))


class HalverBackend:
    """The backend."""

    name = "halver"
    variants = ("default",)

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch."""
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        """Return none."""
        return ()

    def open(self, topology: Topology, device: torch.device) -> HalverSession:
        """Open a session."""
        return HalverSession(topology)
