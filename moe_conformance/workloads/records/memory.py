"""Two tensors in one memory: all ways in which the output of a shared expert can share memory with its input.

A rank builds both tensors from one contiguous memory, and the driver builds them again to know their contents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

Relation = Literal[
    "same tensor",
    "view",
    "slice",
    "detached",
    "expanded",
    "overlapping",
    "disjoint",
    "interleaved",
    "strided",
    "clone",
    "NumPy",
    "DLPack",
    "frombuffer",
]


@dataclass(frozen=True)
class Laid:
    """One of the two tensors (N, D) in `memory_M`; arguments of a call with the same `memory_M` share it."""

    memory_M: Tensor
    relation: Relation
    shape: tuple[int, int]
    which: Literal["out", "x"]


def size(relation: Relation, shape: tuple[int, int]) -> int:
    """Return M, the number of elements of the memory for a relation."""
    N, D = shape
    return D if relation == "expanded" else 2 * N * D


def lay(relation: Relation, memory_M: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return out (N, D) and x (N, D), which lie in one memory as the relation says.

    Args:
        relation: How the memory of out relates to that of x. clone: out is a copy in other memory. strided: x is every
            second row, and out is the second half of all rows. NumPy, DLPack and frombuffer: the tensors overlap by all
            rows but one, in two storages; on a device all three use DLPack, since the others support host memory only.
        memory_M: `size` contiguous elements of any dtype that NumPy has too.
        shape: N, D.

    Degenerate: with N = 0 both are empty.
    """
    N, D = shape
    if relation in ("NumPy", "frombuffer") and memory_M.device.type != "cpu":
        relation = "DLPack"
    rows = memory_M[: N * D].view(N, D) if relation != "expanded" else memory_M.expand(N, D)
    within: dict[Relation, Callable[[], Tensor]] = {
        "same tensor": lambda: rows,
        "view": lambda: rows.view(N, D),
        "slice": lambda: rows[:],
        "detached": lambda: rows.detach(),
        "expanded": lambda: memory_M.expand(N, D),
        "overlapping": lambda: memory_M[D : D + N * D].view(N, D),
        "disjoint": lambda: memory_M[N * D :].view(N, D),
        "clone": lambda: memory_M[N * D :].view(N, D).clone(),
        "DLPack": lambda: from_dlpack(memory_M[D : D + N * D]).view(N, D),
    }
    if relation == "interleaved":
        return memory_M.view(N, 2 * D)[:, 1::2], memory_M.view(N, 2 * D)[:, ::2]
    if relation == "strided":
        return memory_M.view(2 * N, D)[N:], memory_M.view(2 * N, D)[::2]
    if relation == "NumPy":
        array_M = memory_M.numpy()
        return tuple(torch.from_numpy(array_M[at : at + N * D]).view(N, D) for at in (D, 0))  # type: ignore[return-value]
    if relation == "frombuffer":
        array_M, step = memory_M.numpy(), memory_M.element_size()
        parts = (
            torch.frombuffer(array_M, dtype=memory_M.dtype, count=N * D, offset=at * step).view(N, D) for at in (D, 0)
        )
        return tuple(parts)  # type: ignore[return-value]
    return within[relation](), rows
