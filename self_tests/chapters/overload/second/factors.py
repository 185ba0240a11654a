"""The overload report by hand: one bucket per expert, one running account per rank, fractions throughout.

An entry is one forward pass of one layer for one microbatch through one exchange group: what each rank of the group
holds of its routed pairs, over what each would hold under perfect balance. T tokens on a rank, K slots per token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Label = Hashable


class Entry(NamedTuple):
    """One entry as its exchange group sees it: the pairs of each of its ranks, and the balanced count of any."""

    stage: int
    layer: int | None
    pairs: tuple[int, ...]
    balanced: Fraction


class Group(NamedTuple):
    """What the ep * etp ranks of one exchange group bring and hold, by position in the group."""

    ids: Sequence[Ints]
    held: Sequence[Sequence[int]]
    ep: int
    padding: Sequence[Bools | None]
    copies: Sequence[Sequence[int]]


def demand(holds: bool, complaint: str) -> None:
    """Refuse what has no answer."""
    if not holds:
        raise ValueError(complaint)


def check_copies(group: Group) -> None:
    """Copies name positions of the group, none twice, and hold the same tokens."""
    named: list[int] = []
    for copies in group.copies:
        demand(len(copies) > 0, "an empty set of copies")
        named += copies
        demand(all(0 <= place < len(group.ids) for place in copies), f"no position {copies}")
        for other in copies:
            one, two = copies[0], other
            demand(np.array_equal(group.ids[one], group.ids[two]), f"{one} and {two} route differently")
            demand(valid_tokens(group, one) == valid_tokens(group, two), f"{one} and {two} pad differently")
    demand(len(named) == len(set(named)), f"a position in two sets: {named}")


def check_holders(group: Group) -> None:
    """Every expert of the group lies on etp of its ranks, on none twice."""
    etp = len(group.ids) // group.ep
    for expert in {expert for held in group.held for expert in held}:
        holders = [place for place, held in enumerate(group.held) for e in held if e == expert]
        demand(len(holders) == len(set(holders)), f"expert {expert} listed twice")
        demand(len(holders) == etp, f"expert {expert} lies on {len(holders)} ranks, not on {etp}")


def check_group(group: Group) -> None:
    """Refuse a group whose parts do not fit together."""
    ranks = len(group.ids)
    demand(ranks > 0 and group.ep >= 1 and ranks % group.ep == 0, f"{ranks} ranks do not spread over ep {group.ep}")
    demand(len(group.held) == ranks and len(group.padding) == ranks, "held or padding of another number of ranks")
    for ids_TK in group.ids:
        demand(ids_TK.ndim == 2 and ids_TK.dtype == np.int64, "ids are not int64 (T, K)")
        demand(ids_TK.shape[1] == group.ids[0].shape[1] and ids_TK.shape[1] > 0, "ranks differ in K, or K is 0")
        demand(bool((ids_TK >= -1).all()), "an id below -1")
    for ids_TK, padding in zip(group.ids, group.padding, strict=True):
        if padding is not None:
            demand(padding.dtype == np.bool_ and padding.shape == ids_TK.shape[:1], "padding is not bool (T,)")
    check_holders(group)
    check_copies(group)


def valid_tokens(group: Group, place: int) -> list[int]:
    """The tokens of one rank that are no padding."""
    padding = group.padding[place]
    return [t for t in range(len(group.ids[place])) if padding is None or not padding[t]]


def bringers(group: Group) -> list[int]:
    """The positions that bring tokens of their own: all but the second and later copies."""
    later = {place for copies in group.copies for place in copies[1:]}
    return [place for place in range(len(group.ids)) if place not in later]


def buckets(group: Group) -> dict[int, int]:
    """How many routed pairs each expert of the group has; pairs of padding and empty slots have none."""
    pairs = {expert: 0 for held in group.held for expert in held}
    for place in bringers(group):
        for token in valid_tokens(group, place):
            for expert in group.ids[place][token].tolist():
                if expert >= 0:
                    demand(expert in pairs, f"nobody holds expert {expert}")
                    pairs[expert] += 1
    return pairs


def entry(group: Group, stage: int = 0, layer: int | None = 0) -> Entry:
    """Every rank has the buckets of the experts that it holds; balance deals all slots, dropped or not, to ep ranks."""
    check_group(group)
    pairs = buckets(group)
    slots = 0
    for place in bringers(group):
        for _ in valid_tokens(group, place):
            slots += group.ids[place].shape[1]
    loads = tuple(sum(pairs[expert] for expert in held) for held in group.held)
    return Entry(stage, layer, loads, Fraction(slots, group.ep))


def factor(one: Entry) -> Fraction:
    """The hottest rank over balance; an entry without tokens counts as 0."""
    return Fraction(sorted(one.pairs)[-1]) / one.balanced if one.balanced else Fraction(0)


def allowed_error(exact: Fraction, terms: int, growth: Fraction = Fraction(1)) -> Fraction:
    """As many float32 roundings as there are terms, and four more, of a value `growth` times as large."""
    demand(terms >= 0 and growth >= 0, "less than nothing")
    return (4 + terms) * growth * abs(exact) / 8388608


def mean(factors: list[Fraction]) -> Fraction:
    """Every one weighing the same."""
    total = Fraction(0)
    for one in factors:
        total += one
    return total / len(factors)


def reported(
    entries: Sequence[Entry], stage: int, cumulative: Fraction | None, empty: str = "zero", prefix: str = ""
) -> tuple[dict[str, Fraction], set[str]]:
    """What a rank of `stage` reports of all entries of the world, and which of its values may be absent."""
    demand(empty in ("zero", "left_out"), f"empty is {empty}")
    demand(all(one.pairs and min(one.pairs) >= 0 for one in entries), "an entry without ranks or with negative pairs")
    peak = Fraction(0)
    mine: list[Fraction] = []
    by_layer: dict[int, list[Fraction]] = {}
    for one in entries:
        if one.layer is None or (empty == "left_out" and one.balanced == 0):
            continue
        peak = max(peak, factor(one))
        if one.stage == stage:
            mine.append(factor(one))
            by_layer.setdefault(one.layer, []).append(factor(one))
    average, largest, cumulated = (f"{prefix}{name}_overload_factor" for name in ("avg", "max", "max_cum"))
    values = {average: mean(mine) if mine else Fraction(0), largest: peak, cumulated: cumulative or Fraction(0)}
    for layer, factors in by_layer.items():
        values[f"{average}_layer_{layer}"] = mean(factors)
        values[f"{largest}_layer_{layer}"] = max(factors)
    absent = set() if mine else {average, largest, cumulated}
    if cumulative is None:
        absent.add(cumulated)
    return values, absent


def ends(recorded: Sequence[Sequence[Label]], groups: Sequence[Sequence[int]], stages: Sequence[int]) -> list[str]:
    """How a report may end on each rank: with its values, with an error, or with either.

    A group whose ranks recorded different entries has no factor: an error. Slices of one stage that recorded
    different numbers of entries leave the choice; so does anything that goes wrong elsewhere in the world.
    """
    world = len(recorded)
    demand(len(stages) == world, "a stage for every rank")
    demand(sorted(rank for group in groups for rank in group) == list(range(world)), "every rank is in one group")
    broken = []
    uneven = False
    for group in groups:
        demand(all(stages[rank] == stages[group[0]] for rank in group), f"{group} lies over two stages")
        for rank in group:
            if any(
                amount(recorded[group[0]], x) != amount(recorded[rank], x)
                for x in [*recorded[group[0]], *recorded[rank]]
            ):
                broken += list(group)
                break
    for one in range(world):
        for two in range(world):
            if stages[one] == stages[two] and len(recorded[one]) != len(recorded[two]):
                uneven = True
    calm = "either" if broken or uneven else "values"
    return ["error" if rank in broken else calm for rank in range(world)]


def amount(labels: Sequence[Label], label: Label) -> int:
    """How often a label was recorded."""
    return sum(1 for one in labels if one == label)
