"""The parameters of experts in a new model: which parts have to be equal over ranks, and which have to differ.

Sources: arithmetic. Replicas that start with different values stay different, since gradients alone are reduced;
experts that start with equal values, and are routed to alike, stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["not finite", "constant", "replica differs", "same values"]
_MATRICES = ("gate", "up", "down")


class Part(NamedTuple):
    """A parameter, or a shard of it, as one rank holds it."""

    rank: int
    stage: int  # of the pipeline; each has layers of its own
    name: str  # as in `Named`
    expert: int | None
    shard: tuple[int, int, int] | None
    value: Tensor


class Problem(NamedTuple):
    """What is wrong with a part, by its place in what was given, and with which earlier one it was compared."""

    kind: Kind
    part: int
    other: int | None = None


def problems(parts: Sequence[Part]) -> list[Problem]:
    """List what is wrong with the parameters of a new model, in the order of kinds and parts.

    Rule: every element is finite. Parts of one name, expert, shard and stage are replicas, and have the bytes of the
    first of them. Any two other parts of one name, stage and shape, of a matrix (gate, up, down) that is drawn at
    random in both, differ in more than half of their elements: those of different experts on any ranks, and different
    shards of one expert. If there are several experts, each has a matrix that is drawn at random.

    A matrix is drawn at random if not all of its elements are equal.

    Degenerate: no part, or one of one expert, has nothing to be compared with. Biases need only be equal over replicas.

    Decides: EXPT-11. Source: arithmetic.

    >>> one, two = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 2.5]])
    >>> held = [Part(0, 0, "up", 0, None, one), Part(1, 0, "up", 1, None, one), Part(2, 0, "up", 0, None, two)]
    >>> problems(held)
    [Problem(kind='replica differs', part=2, other=0), Problem(kind='same values', part=1, other=0)]
    >>> problems([Part(0, 0, "up", 0, None, one), Part(1, 0, "up", 1, None, two)])
    []
    """
    found = [Problem("not finite", n) for n, part in enumerate(parts) if not bool(part.value.isfinite().all())]
    firsts = _firsts(parts)
    found += [Problem("constant", n) for n in _without_draws(parts, sorted(firsts.values()))]
    for n, part in enumerate(parts):
        first = firsts[_key(part)]
        if not _same_bytes(part.value, parts[first].value):
            found.append(Problem("replica differs", n, first))
    for first, second in combinations(sorted(firsts.values()), 2):
        if _too_alike(parts[first], parts[second]):
            found.append(Problem("same values", second, first))
    return found


def _key(part: Part) -> tuple[object, ...]:
    return part.stage, part.name, part.expert, part.shard


def _firsts(parts: Sequence[Part]) -> dict[tuple[object, ...], int]:
    """Return the first of all replicas of each part."""
    firsts: dict[tuple[object, ...], int] = {}
    for n, part in enumerate(parts):
        firsts.setdefault(_key(part), n)
    return firsts


def _without_draws(parts: Sequence[Part], firsts: Sequence[int]) -> list[int]:
    """Return the first matrix of every expert that has none with different elements, if there are several experts."""
    matrices: dict[tuple[int, int | None], list[int]] = {}
    for n in firsts:
        if parts[n].name in _MATRICES:
            matrices.setdefault((parts[n].stage, parts[n].expert), []).append(n)
    if len({expert for _, expert in matrices}) < 2:
        return []
    return [held[0] for held in matrices.values() if not any(_is_drawn(parts[n].value) for n in held)]


def _too_alike(one: Part, other: Part) -> bool:
    if (one.stage, one.name) != (other.stage, other.name) or one.name not in _MATRICES:
        return False
    if one.value.shape != other.value.shape or not (_is_drawn(one.value) and _is_drawn(other.value)):
        return False
    return 2 * int((one.value == other.value).sum()) >= one.value.numel()


def _is_drawn(value: Tensor) -> bool:
    return value.numel() > 0 and bool((value != value.flatten()[0]).any())


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, other)))
