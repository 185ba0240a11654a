"""Gradient shards: the gradients of a whole model, put together from what the ranks hold of them.

Ranks hold shards: dense and expert parameters cut over tp, ep, etp, pp and by sharded optimisers, and copied
over dp, cp, edp. Norms, clipping and comparisons know nothing of that: they are of the whole.

What they are divided by when they are finished is one number for all of them.

Source: ZeRO (Rajbhandari et al. 2020) section 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """A rank's piece of one finished gradient: the parameter's name in the whole model, and which elements."""

    parameter: str
    elements_n: Tensor  # int64 (n,), places in the flattened whole parameter
    values_n: Tensor  # (n,)


def whole(shards_by_rank: Sequence[Sequence[Shard]], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Put every parameter's gradient together from its shards, -> float64 (size,) by name, in the order of `sizes`.

    Rule: an element is what its holders have, once, however many they are. A parameter of two stages has one
    name and counts once.

    Degenerate: empty shards and ranks without shards add nothing; a parameter of size 0 is empty.

    Raises:
        ValueError: holders of an element that differ (two NaN do not), an element that no rank holds, that is
            out of range or twice on one rank, a parameter without a size, shapes that do not fit.

    Decides: GRAD-16. Source: arithmetic.

    >>> one = [Shard("a", torch.tensor([0, 2]), torch.tensor([5.0, 7.0]))]
    >>> two = [Shard("a", torch.tensor([2, 1]), torch.tensor([7.0, 6.0])), Shard("b", torch.tensor([0]), torch.ones(1))]
    >>> {name: g.tolist() for name, g in whole([one, two], {"a": 3, "b": 1}).items()}
    {'a': [5.0, 6.0, 7.0], 'b': [1.0]}
    """
    made = {}
    for name, held in _holders(shards_by_rank, sizes).items():
        for element, values in held.items():
            if any(value != values[0] and not (isnan(value) and isnan(values[0])) for value in values):
                raise ValueError(f"element {element} of {name} is {values} on its ranks; it has one gradient")
        made[name] = torch.tensor([held[element][0] for element in range(sizes[name])], dtype=torch.float64)
    return made


def copies(shards_by_rank: Sequence[Sequence[Shard]], sizes: Mapping[str, int]) -> dict[str, int]:
    """Count the replicas of every parameter: how many ranks hold each of its elements.

    Rule: the shards of one replica cover every element once, so all elements have as many holders as there
    are replicas. Degenerate: a parameter of size 0 has 0.

    Raises:
        ValueError: as `whole`, but for values; elements of one parameter with different numbers of holders.

    Decides: GRAD-16. Source: ZeRO section 5 (shards).

    >>> first, rest = torch.tensor([0]), torch.tensor([1, 2])
    >>> ranks = [[Shard("a", first, torch.ones(1))], [Shard("a", rest, torch.ones(2))]]
    >>> copies(ranks, {"a": 3}), copies(ranks + ranks, {"a": 3})
    ({'a': 1}, {'a': 2})
    """
    made = {}
    for name, held in _holders(shards_by_rank, sizes).items():
        numbers = {len(values) for values in held.values()} or {0}
        if len(numbers) > 1:
            raise ValueError(f"elements of {name} are held by {sorted(numbers)} ranks: shards do not cover them evenly")
        made[name] = numbers.pop()
    return made


def divisor(dp: int, cp: int, convention: Literal["sum", "mean_over_dp"]) -> int:
    """Say by what the gradients of all tokens are divided when they are finished, for experts and routers alike.

    Rule: 1 where losses are summed, "sum"; dp * cp where a rank's loss counts as that of one of dp * cp parts of the
    batch, of which the mean is taken. Never tp, ep, etp or edp: they are ways to hold the same batch.

    Degenerate: dp = cp = 1 divides by 1 in both.

    Raises:
        ValueError: another convention, or a size below 1.

    Decides: ROUTE-08, GRAD-05. Source: the gradient of a mean is the mean of gradients.

    >>> divisor(4, 3, "sum"), divisor(4, 3, "mean_over_dp")
    (1, 12)
    """
    if convention not in ("sum", "mean_over_dp") or dp < 1 or cp < 1:
        raise ValueError(f"dp = {dp}, cp = {cp}, {convention!r}: need sizes of at least 1, and sum or mean_over_dp")
    return dp * cp if convention == "mean_over_dp" else 1


def _holders(shards_by_rank: Sequence[Sequence[Shard]], sizes: Mapping[str, int]) -> dict[str, dict[int, list[float]]]:
    """List, for every parameter and element, the values that the ranks hold."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in sizes}
    for rank, shards in enumerate(shards_by_rank):
        seen = set()
        for name, elements_n, values_n in shards:
            if name not in sizes or elements_n.dim() != 1 or elements_n.shape != values_n.shape:
                shapes = f"{tuple(elements_n.shape)} elements, {tuple(values_n.shape)} values"
                raise ValueError(f"rank {rank} holds {name} with {shapes}: need a known name and (n,) of both")
            for element, value in zip(elements_n.tolist(), values_n.double().tolist(), strict=True):
                if (name, element) in seen or not 0 <= element < sizes[name]:
                    where = f"rank {rank}: element {element} of {name}"
                    raise ValueError(f"{where} is there twice, or not one of its {sizes[name]}")
                seen.add((name, element))
                found[name].setdefault(element, []).append(value)
    for name, held in found.items():
        if missing := set(range(sizes[name])) - set(held):
            raise ValueError(f"nobody holds elements {sorted(missing)} of {name}; every one has a holder")
    return found
