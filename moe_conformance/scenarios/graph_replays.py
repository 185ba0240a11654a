"""Count the replays of captured graphs: what a graph has computed is told from what only said that it would be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch


@dataclass
class Replays:
    """The number of replays so far."""

    count: int = 0


@contextmanager
def counted_replays() -> Iterator[Replays]:
    """Yield the number of replays of `torch.cuda.CUDAGraph` in the block; 0 where torch has no such class."""
    found = Replays()
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        found.count += 1
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", counted):
        yield found
