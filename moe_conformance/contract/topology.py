"""Layouts of ranks, and the process groups of a layout.

A layout divides the same world twice (parallel folding): for the dense groups in the order tp (fastest), cp, dp, pp;
for the expert groups in the order etp (fastest), ep, edp, pp. A group of an axis is the set of ranks that differ in
that coordinate only. Whether a layout exists is decided by `Layout.problem` alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch.distributed as dist

GROUPS = ("world", "tp", "cp", "pp", "dp", "dp_cp", "ep", "etp", "ep_etp", "edp")

RankLists = tuple[tuple[int, ...], ...]


class InvalidLayout(ValueError):
    """The sizes do not fit the world; the message says which product does not divide it."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes in a world of ranks; dp and edp follow from them."""

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @cached_property
    def problem(self) -> str | None:
        """Why the layout cannot be built, in one sentence, or None."""
        for name in ("world", "tp", "cp", "pp", "ep", "etp"):
            if getattr(self, name) < 1:
                return f"{name} = {getattr(self, name)} is not positive"
        for names in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
            product = math.prod(getattr(self, name) for name in names)
            if self.world % product:
                return f"{' * '.join(names)} = {product} does not divide the world of {self.world} ranks"
        return None

    @property
    def dp(self) -> int:
        """Data parallel size of dense parameters."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Expert data parallel size: the number of replicas of every expert."""
        return self.world // (self.etp * self.ep * self.pp)

    @cached_property
    def name(self) -> str:
        """The axes larger than one with their sizes, e.g. `tp2-ep2-edp2`; `single` if there are none."""
        axes = {axis: getattr(self, axis) for axis in ("tp", "cp", "pp", "ep", "etp", "edp")}
        return "-".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "single"

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the world and of all axes, by name."""
        return {name: getattr(self, name) for name in ("world", "tp", "cp", "pp", "dp", "ep", "etp", "edp")}

    def groups(self) -> dict[str, RankLists]:
        """Return all groups of every name in `GROUPS`: ranks ascending, groups in the order of their first ranks.

        Raises:
            InvalidLayout: the layout has a `problem`.
        """
        return dict(_groups_of(self))


@lru_cache(maxsize=32)  # hundreds of virtual ranks ask for the same
def _groups_of(layout: Layout) -> Mapping[str, RankLists]:
    if layout.problem:
        raise InvalidLayout(f"{layout}: {layout.problem}")
    dense = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    expert = {"etp": layout.etp, "ep": layout.ep, "edp": layout.edp, "pp": layout.pp}
    groups: dict[str, RankLists] = {"world": (tuple(range(layout.world)),)}
    groups |= {axis: _split(dense, {axis}) for axis in dense}
    groups["dp_cp"] = _split(dense, {"dp", "cp"})
    groups |= {axis: _split(expert, {axis}) for axis in ("ep", "etp", "edp")}
    groups["ep_etp"] = _split(expert, {"ep", "etp"})
    return {name: groups[name] for name in GROUPS}


def _split(fold: Mapping[str, int], varying: set[str]) -> RankLists:
    """Return the groups of ranks that differ in the varying axes only; the first axis of the fold varies fastest."""
    buckets: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(fold.values())):
        rest, key = rank, []
        for axis, size in fold.items():
            rest, coordinate = divmod(rest, size)
            if axis not in varying:
                key.append(coordinate)
        buckets.setdefault(tuple(key), []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in buckets.values()))


def named(name: str) -> Layout:
    """Return the layout that has this `Layout.name`.

    >>> named("tp2-ep2-edp2")
    Layout(world=4, tp=2, cp=1, pp=1, ep=2, etp=1)
    """
    sizes = {axis: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", name)}
    world = sizes.pop("edp", 1) * math.prod(sizes.get(axis, 1) for axis in ("pp", "ep", "etp"))
    return Layout(world, **sizes)


def layouts(world: int) -> Iterator[Layout]:
    """Yield every valid layout of a world, sizes ascending: etp varies fastest, then tp."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for pp in sizes:
        for cp in sizes:
            for ep in sizes:
                for tp in sizes:
                    for etp in sizes:
                        layout = Layout(world, tp, cp, pp, ep, etp)
                        if layout.problem is None:
                            yield layout


@dataclass(frozen=True)
class Topology:
    """A layout and the process groups of one rank. Implements `contract.Topology`."""

    layout: Layout
    rank: int
    process_groups: Mapping[str, dist.ProcessGroup]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the world and of all axes, by name."""
        return self.layout.sizes()

    @cached_property
    def _ranks(self) -> dict[str, tuple[int, ...]]:
        return {
            name: next(ranks for ranks in lists if self.rank in ranks) for name, lists in self.layout.groups().items()
        }

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the world ranks of this rank's group of that name."""
        return self._ranks[name]

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of that name that this rank is in."""
        return self.process_groups[name]
