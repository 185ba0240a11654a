"""Moving a checkpoint by hand: every element has an address, and moving is copying by address.

Values are bit patterns (integers), so that equal means the same bits, whatever number they spell. An element of a
parameter is addressed by (name, global expert id, index in the whole parameter); a layout says which ranks keep
that element and where in their part. CKPT-01, -04, -06, -07.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int64]
Key = tuple[str, int]
Index = tuple[int, ...]
Parameters = Mapping[Key, Bits]


def indices(shape: Sequence[int]) -> list[Index]:
    """Every index of a tensor."""
    return [tuple(index) for index in np.ndindex(*shape)]


# The dimension of a parameter that the etp ranks of an expert divide among them; others they all hold whole.
CUT = {"gate": 0, "up": 0, "down": 1}


class Layout(NamedTuple):
    """How many ranks, how many along ep and etp (etp fastest, then ep), and the ids of each ep place."""

    world: int
    ep: int
    etp: int
    dealt: Sequence[Sequence[int]]


def must_be_filled(layout: Layout, experts: int) -> None:
    """Refuse a layout that leaves ranks over, or does not deal each expert out once."""
    if min(layout.world, layout.ep, layout.etp, experts) < 1 or layout.world % (layout.ep * layout.etp) != 0:
        raise ValueError(f"{layout} does not fill its world")
    dealt = [expert for ids in layout.dealt for expert in ids]
    if len(layout.dealt) != layout.ep or any(dealt.count(e) != 1 for e in range(experts)) or len(dealt) != experts:
        raise ValueError(f"{layout} does not deal {experts} experts out")


def in_runs(world: int, ep: int, etp: int, experts: int) -> Layout:
    """Experts dealt out in equal runs."""
    share = experts // ep
    return Layout(world, ep, etp, [[place * share + n for n in range(share)] for place in range(ep)])


def holds(rank: int, key: Key, index: Index, shape: Sequence[int], layout: Layout) -> Index | None:
    """Where in its own part of a parameter the rank keeps this element; none if it does not."""
    name, expert = key
    if expert not in layout.dealt[(rank // layout.etp) % layout.ep]:
        return None
    if name not in CUT:
        return index
    cut = CUT[name]
    width = shape[cut] // layout.etp
    place = index[cut] - (rank % layout.etp) * width
    return (*index[:cut], place, *index[cut + 1 :]) if 0 <= place < width else None


def part_shape(name: str, shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Shape of one rank's part of a parameter."""
    if name in CUT and shape[CUT[name]] % layout.etp != 0:
        raise ValueError(f"{name} {shape} does not divide by etp {layout.etp}")
    return tuple(size // layout.etp if CUT.get(name) == axis else size for axis, size in enumerate(shape))


def dealt_out(parameters: Parameters, layout: Layout) -> list[dict[Key, Bits]]:
    """What each rank holds: its experts' parameters, each element where the layout puts it."""
    known = [expert for experts in layout.dealt for expert in experts]
    if any(expert not in known for _, expert in parameters):
        raise ValueError(f"an expert that is not one of {known}")
    ranks: list[dict[Key, Bits]] = [{} for _ in range(layout.world)]
    for key, whole in parameters.items():
        for rank, held in enumerate(ranks):
            if key[1] not in layout.dealt[(rank // layout.etp) % layout.ep]:
                continue
            part = np.zeros(part_shape(key[0], whole.shape, layout), dtype=whole.dtype)
            for index in indices(whole.shape):
                place = holds(rank, key, index, whole.shape, layout)
                if place is not None:
                    part[place] = whole[index]
            held[key] = part
    return ranks


def gathered(ranks: Sequence[Mapping[Key, Bits]], layout: Layout) -> dict[Key, Bits]:
    """The whole parameters again: every element from all ranks that keep it, which must say the same."""
    if len(ranks) != layout.world:
        raise ValueError(f"{len(ranks)} ranks of {layout.world}")
    for rank, held in enumerate(ranks):
        for _, expert in held:
            if expert not in layout.dealt[(rank // layout.etp) % layout.ep]:
                raise ValueError(f"rank {rank} does not own expert {expert}")
    whole = {}
    for key in {key for held in ranks for key in held}:
        owners = [r for r in range(layout.world) if key[1] in layout.dealt[(r // layout.etp) % layout.ep]]
        if any(key not in ranks[rank] for rank in owners):
            raise ValueError(f"{key} is on some of its owners {owners} only")
        if len({ranks[rank][key].shape for rank in owners}) > 1:
            raise ValueError(f"parts of {key} differ in shape")
        shape = list(ranks[owners[0]][key].shape)
        if key[0] in CUT:
            shape[CUT[key[0]]] *= layout.etp
        made = np.zeros(shape, dtype=ranks[owners[0]][key].dtype)
        for index in indices(shape):
            said = set()
            for rank in owners:
                place = holds(rank, key, index, shape, layout)
                if place is not None:
                    said.add(int(ranks[rank][key][place]))
            if len(said) != 1:
                raise ValueError(f"{key} {index}: {len(said)} values")
            made[index] = said.pop()
        whole[key] = made
    return whole


def agreed(values: Sequence[Bits]) -> Bits:
    """The one value that all ranks hold."""
    if not values:
        raise ValueError("no rank, no value")
    for value in values:
        if (value.shape, value.dtype, value.tolist()) != (values[0].shape, values[0].dtype, values[0].tolist()):
            raise ValueError("ranks differ")
    return values[0]
