"""Checkpoints: the parts of experts that every rank holds, put together and cut again for another layout.

An expert is addressed by its global id. Layout decides which rank holds which part of it: ep spreads experts,
etp cuts them, edp repeats them. The same holds for whatever has the shape of a parameter, optimiser state
among it. Nothing is cast. Names and coverage of a checkpoint are judged in `checkpoint_rules.py`.

Sources: arithmetic: experts are named by what they are, not by where they lie; MoE parallel folding (Liu et
al. 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_conformance.reference.checkpoints.layouts import Layout, coordinates
from moe_conformance.reference.experts import Parameters

SHARDED: Mapping[str, int] = {"gate": 0, "up": 0, "down": 1}
"""The dimension along which etp cuts a parameter; one that is not named is held whole by every shard."""


def shard(parameters: Parameters, layout: Layout) -> tuple[dict[tuple[str, int], Tensor], ...]:
    """Cut whole parameters into what every rank holds, by (name, global expert id).

    Rule: a rank holds the experts of its ep coordinate, and of each the part of its etp coordinate: equal
    consecutive parts along `SHARDED`. Ranks that differ in edp alone hold the same.

    Degenerate: what `parameters` lacks, such as the state of an expert that never got a token, no rank gets.

    Raises:
        ValueError: an expert outside of 0 .. E - 1, or a dimension that etp does not divide.

    Decides: CKPT-01, CKPT-04. Source: arithmetic.

    >>> whole = {("down", e): torch.tensor([[10, 11, 12, 13]]) + 10 * e for e in (0, 1)}
    >>> [held["down", e].tolist() for held in shard(whole, Layout(4, ep=2, etp=2, experts=2)) for _, e in held]
    [[[10, 11]], [[12, 13]], [[20, 21]], [[22, 23]]]
    """
    outside = sorted({e for _, e in parameters if not 0 <= e < layout.experts})
    if outside:
        raise ValueError(f"experts {outside} are outside 0 .. {layout.experts - 1}")
    by_rank = []
    for rank in range(layout.world):
        at_etp, at_ep, _ = coordinates(rank, layout)
        mine: dict[tuple[str, int], Tensor] = {}
        for (name, e), value in parameters.items():
            if e in layout.held()[at_ep]:
                mine[name, e] = _part(name, value, at_etp, layout.etp)
        by_rank.append(mine)
    return tuple(by_rank)


def assemble(by_rank: Sequence[Parameters], layout: Layout) -> dict[tuple[str, int], Tensor]:
    """Put the parts of all ranks together to whole parameters; undoes `shard`.

    Degenerate: what no rank holds is absent.

    Raises:
        ValueError: another number of ranks; a rank with an expert of another one's; a name that only some of
            an expert's holders have; replicas over edp, or over etp of what is not cut, that differ in a bit;
            parts over etp that differ in shape or dtype.

    Decides: CKPT-01, CKPT-04. Source: arithmetic.

    >>> layout = Layout(world=4, ep=1, etp=2, experts=1)
    >>> parts = [{("gate", 0): torch.tensor([[rank % 2, 5]])} for rank in range(4)]
    >>> assemble(parts, layout)["gate", 0].tolist()
    [[0, 5], [1, 5]]
    """
    if len(by_rank) != layout.world:
        raise ValueError(f"{len(by_rank)} ranks for a world of {layout.world}")
    whole: dict[tuple[str, int], Tensor] = {}
    for at_ep, experts in enumerate(layout.held()):
        holders = [rank for rank in range(layout.world) if coordinates(rank, layout)[1] == at_ep]
        for name, e in dict.fromkeys(key for rank in holders for key in by_rank[rank]):
            if e not in experts:
                raise ValueError(f"ranks {holders} hold experts {list(experts)}, but one has {name} of expert {e}")
            lacking = [rank for rank in holders if (name, e) not in by_rank[rank]]
            if lacking:
                raise ValueError(f"{name} of expert {e} is held by some of the ranks {holders}, but not by {lacking}")
            parts = []  # by etp coordinate
            for at_etp in range(layout.etp):
                replicas = [rank for rank in holders if coordinates(rank, layout)[0] == at_etp]
                parts.append(agreed([by_rank[rank][name, e] for rank in replicas]))
            whole[name, e] = _joined(name, parts) if name in SHARDED else agreed(parts)
    return whole


def reshard(by_rank: Sequence[Parameters], before: Layout, after: Layout) -> tuple[dict[tuple[str, int], Tensor], ...]:
    """Compute what every rank of one layout holds after loading what the ranks of another one saved.

    Rule: assemble, then shard. So there and back is the identity, and every element keeps its bits under its
    global expert id; with state in place of parameters, it follows its parameter element by element.

    Degenerate: the same layout twice gives every rank its own.

    Raises:
        ValueError: other experts before and after, and as `shard` and `assemble`.

    Decides: CKPT-01, CKPT-04, CKPT-06. Source: arithmetic.

    >>> one, two = Layout(1, ep=1, etp=1, experts=2), Layout(2, ep=2, etp=1, experts=2)
    >>> saved = [{("gate", 0): torch.tensor([[7]]), ("gate", 1): torch.tensor([[8]])}]
    >>> reshard(saved, one, two)
    ({('gate', 0): tensor([[7]])}, {('gate', 1): tensor([[8]])})
    """
    if before.experts != after.experts:
        raise ValueError(f"{before.experts} experts were saved, {after.experts} are to be loaded")
    return shard(assemble(by_rank, before), after)


def agreed(values_by_rank: Sequence[Tensor]) -> Tensor:
    """Return the one value that all ranks hold, bit for bit: a NaN is itself, 0.0 is not -0.0.

    For replicas, and for state that is not a parameter, such as the expert bias, saved and loaded.

    Raises:
        ValueError: no rank, or ranks that differ in shape, dtype or a bit.

    Decides: CKPT-01, CKPT-07. Source: arithmetic.

    >>> agreed([torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])])
    tensor([1., nan])
    """
    if not values_by_rank:
        raise ValueError("there is no rank, so no value")
    first = values_by_rank[0]
    for other in values_by_rank[1:]:
        if not same_bits(first, other):
            raise ValueError(f"ranks hold different values of what is one: {first} and {other}")
    return first


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bytes.

    >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0)), same_bits(torch.tensor([7]), torch.tensor([7]))
    (False, True)
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bytes_of = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other)]
    return torch.equal(*bytes_of)


def _part(name: str, value: Tensor, part: int, parts: int) -> Tensor:
    """Cut the part of one etp coordinate, or return the whole of what is not cut."""
    if name not in SHARDED:
        return value
    dimension = SHARDED[name]
    if value.shape[dimension] % parts:
        raise ValueError(f"{name} {tuple(value.shape)} cannot be cut into {parts} equal parts along {dimension}")
    return value.chunk(parts, dim=dimension)[part] if value.shape[dimension] else value


def _joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Put the parts of all etp coordinates together; equal parts, as `_part` cuts them."""
    if len({(part.shape, part.dtype) for part in parts}) > 1:
        shapes = [(tuple(part.shape), part.dtype) for part in parts]
        raise ValueError(f"the parts of {name} over etp differ in shape or dtype: {shapes}")
    return torch.cat(list(parts), dim=SHARDED[name])
