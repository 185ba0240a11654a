"""Two tensors in one memory: every way in which the output of a shared expert can lie to the tokens it came from.

A rank builds both tensors from one run of elements, and the driver builds them again to know what they held.
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
    """One tensor (N, D) of the two that lie in `memory_M`; arguments of a call with the same memory share it."""

    memory_M: Tensor
    relation: Relation
    shape: tuple[int, int]
    which: Literal["out", "x"]


def size(relation: Relation, shape: tuple[int, int]) -> int:
    """Return M, how many elements the memory of a relation has."""
    N, D = shape
    return D if relation == "expanded" else 2 * N * D


def lay(relation: Relation, memory_M: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return out (N, D) and x (N, D) in a memory; of a clone or a buffer of another library, in a copy of it.

    Args:
        relation: How out lies to x. Strided: x is every second row, and out has the last ones of these and what lies
            between them, so that they share more bytes than as many elements in one run would. Those of NumPy, DLPack
            and `torch.frombuffer` overlap by all rows but one, in two storages; of device memory all three are
            DLPack's, since the others know host memory alone.
        memory_M: `size` elements of any dtype that has a NumPy twin, in one run.
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
