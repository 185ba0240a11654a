"""Windows on parameters of which FSDP2 keeps a chunk of rows on every rank; for adapters of any library.

FSDP2 cuts dimension 0 into chunks of ceil(rows / ranks), so that the last may be shorter or empty. A window is on one
of equal parts (`Named.shard`) or on the whole: what is neither is refused, before anything runs and on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_conformance.contract import Named, Read, Unsupported


def local(parameter: Tensor) -> Tensor:
    """Return the local tensor of a sharded parameter, with the local tensor of its gradient; others as they are."""
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        found: Tensor = parameter.to_local()
        found.grad = None if parameter.grad is None else parameter.grad.to_local()  # type: ignore[attr-defined]
    return found


def require_parts(widths: Sequence[int], ranks: int) -> None:
    """Raise `Unsupported` unless every rank's chunk is made of windows on the blocks of these widths."""
    for rank in range(ranks):
        parts_of(_chunk(sum(widths), ranks, rank), widths)


def require_one_bias(widths: Sequence[int]) -> None:
    """Raise `Unsupported` for shared experts of several widths: fused into one they have one bias for all."""
    if len(widths) != 1:
        raise Unsupported(f"shared.bias: {len(widths)} shared experts of widths {widths} are one, and it has one bias")


def whole_window(name: str, parameter: Tensor, read: Read) -> Iterator[Named]:
    """Yield the window on a parameter (rows, columns) of which this rank has rows; none where it has none."""
    for _, rows, shard in parts_of(_kept(parameter), (len(parameter),)):
        yield Named(name, None, read(local(parameter))[rows], shard)


def shared_windows(
    gate_up_FD: tuple[Tensor, Tensor], down: nn.Linear, widths: Sequence[int], read: Read
) -> Iterator[Named]:
    """Yield the windows on shared experts of some widths that lie in one, (F, D) and (D, F), one after the other.

    The output bias, if there is one, is the only expert's.
    """
    for name, parameter in zip(("shared_gate", "shared_up"), gate_up_FD, strict=True):
        view = read(local(parameter))
        for j, rows, shard in parts_of(_kept(parameter), widths):
            yield Named(name, j, view[rows], shard)
    for window in whole_window("shared_down", down.weight, read):
        for j, (width, end) in enumerate(zip(widths, accumulate(widths), strict=True)):
            yield Named("shared_down", j, window.view[:, end - width : end], window.shard)
    if down.bias is not None:
        for window in whole_window("shared_bias", down.bias, read):
            yield replace(window, expert=0)


def _kept(parameter: Tensor) -> range:
    """Return the rows of a parameter that this rank holds."""
    if not isinstance(parameter, DTensor):
        return range(len(parameter))
    cut = [axis for axis, placement in enumerate(parameter.placements) if placement.is_shard(0)]
    if not cut:
        return range(len(parameter))
    (axis,) = cut
    return _chunk(len(parameter), parameter.device_mesh.size(axis), parameter.device_mesh.get_local_rank(axis))


def _chunk(rows: int, of: int, index: int) -> range:
    size = -(-rows // of)
    return range(rows)[index * size : (index + 1) * size]


def parts_of(rows: range, widths: Sequence[int]) -> Sequence[tuple[int, slice, tuple[int, int, int] | None]]:
    """Return the blocks that some rows contain, for blocks of given widths: (block, its rows, part of the block).

    Raises:
        Unsupported: the rows hold something of a block that is not one of so many equal parts.
    """
    found, start = [], 0
    for j, width in enumerate(widths):
        first, last = max(rows.start, start), min(rows.stop, start + width)
        if first < last:
            count, offset = last - first, first - start
            if width % count or offset % count:
                raise Unsupported(f"FSDP2 keeps rows {first} to {last - 1} together, no equal part of block {j}")
            shard = None if count == width else (0, offset // count, width // count)
            found.append((j, slice(first - rows.start, last - rows.start), shard))
        start += width
    return found
