"""Places (microbatch, rank), pipeline stages, and shards of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records.workload import Workload

Place = tuple[int, int]  # (microbatch, rank): stands for the tokens of one rank in one microbatch
Shard = tuple[int, int, int] | None  # (dim, index, of), None for the whole


def places_of(workload: Workload, ranks: Iterable[int]) -> tuple[Place, ...]:
    """Return the places of some ranks, ordered by microbatch."""
    ranks = tuple(ranks)
    return tuple((m, rank) for m in range(len(workload.batches)) for rank in ranks)


def backward_places_of(workload: Workload, ranks: Iterable[int]) -> tuple[Place, ...]:
    """Return the places of some ranks whose microbatches go backward: only these add to parameter gradients."""
    return tuple(place for place in places_of(workload, ranks) if workload.goes_backward(place[0]))


def stages(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every pipeline stage; a stage has its own batch and parameters.

    >>> stages(Layout(4, pp=2))
    ((0, 1), (2, 3))
    """
    return tuple(zip(*layout.groups()["pp"], strict=True))


def shard_of(full: Tensor, shard: Shard) -> Tensor:
    """Return a view of the shard (dim, index, of) of a full tensor.

    >>> import torch
    >>> shard_of(torch.arange(6), (0, 1, 3)).tolist()
    [2, 3]
    """
    if shard is None:
        return full
    dim, index, of = shard
    width = full.shape[dim] // of
    return full.narrow(dim, index * width, width)


def whole(shards: Iterable[Shard]) -> bool:
    """Return whether shards make up the whole tensor: the whole itself, or all indices along one dimension.

    >>> whole([(0, 0, 2), (0, 1, 2)]), whole([(0, 0, 2), (1, 1, 2)]), whole([None])
    (True, False, True)
    """
    shards = set(shards)
    cuts = {(shard[0], shard[2]) for shard in shards if shard}
    return None in shards or any({(dim, i, of) for i in range(of)} <= shards for dim, of in cuts)


LOCAL_PART = "only this rank's part is in it, that of its own experts"  # and nothing from other ranks of ep


def is_held(layout: Layout, rank: int, ids_TK: Tensor, experts: int) -> Tensor:
    """Return a bool mask (T, K) of the slots whose experts a rank holds."""
    ranks = next(group for group in layout.groups()["ep"] if rank in group)
    return ids_TK.div(experts // layout.ep, rounding_mode="floor") == ranks.index(rank)


def other_sums(workload: Workload, rank: int) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """Yield what a rank may have summed over by mistake instead of all tokens of its stage: words and places.

    Every set of places is yielded once, under its first name. Only the last one has microbatches that only go forward.
    """
    layout = workload.layout
    microbatches = [m for m in range(len(workload.batches)) if workload.goes_backward(m)]
    stage = next(ranks for ranks in stages(layout) if rank in ranks)
    everything = backward_places_of(workload, stage)
    named: dict[tuple[Place, ...], str] = {}
    named[backward_places_of(workload, [rank])] = (
        "it contains only the tokens of its own rank (it was not reduced over ranks)"
    )
    axes: dict[tuple[Place, ...], list[str]] = {}
    for name in ("ep_etp", "ep", "etp", "edp", "tp", "dp_cp"):
        ranks = next(group for group in layout.groups()[name] if rank in group)
        axes.setdefault(backward_places_of(workload, ranks), []).append(name)
    for places, names in axes.items():
        named.setdefault(places, f"only the tokens of its own {' or '.join(names)} group are in it")
    for missing in stage:
        left = tuple(place for place in everything if place[1] != missing)
        named.setdefault(left, f"the tokens of rank {missing} are missing in it")
    for m in microbatches:
        only = tuple(place for place in everything if place[0] == m)
        named.setdefault(only, f"only microbatch {m} is in it")
    for m in microbatches:
        left = tuple(place for place in everything if place[0] != m)
        named.setdefault(left, f"microbatch {m} is missing in it")
    named.setdefault(places_of(workload, stage), "microbatches without a backward are in it too")
    return ((words, places) for places, words in named.items() if places and places != everything)
