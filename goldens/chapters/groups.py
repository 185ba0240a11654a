"""Golden of process groups: the ranks of every group in some layouts, and which sizes make a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, named
from moe_conformance.reference.groups import members

NAMES = ("world", "tp", "cp", "pp", "dp", "dp_cp", "ep", "etp", "ep_etp", "edp")
# name: world, tp, cp, pp, ep, etp
LAYOUTS: Mapping[str, Sequence[int]] = {
    "one-rank": (1, 1, 1, 1, 1, 1),
    "ep-beside-tp": (12, 3, 1, 1, 2, 1),
    "all-axes": (32, 2, 2, 2, 2, 2),
    "etp-alone": (6, 1, 1, 1, 1, 6),
    "ep-over-dp-and-cp": (24, 2, 3, 1, 12, 1),
    "folded-apart": (30, 1, 5, 1, 3, 2),
    "one-stage-a-rank": (5, 1, 1, 5, 1, 1),
}


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return sizes of which about half make a layout, and some that are not positive."""
    worlds_N = rng.choice([1, 2, 6, 8, 12, 16, 24, 30], size=200)
    sizes_N6 = np.stack([worlds_N, *rng.choice([1, 1, 1, 2, 3, 4], size=(5, 200))], axis=1)
    spoilt_N6 = np.ones((6, 6), dtype=np.int64) - np.diag([1, 2, 1, 3, 1, 1])
    found = named("sizes", "in", {"sizes_N6": sizes_N6}) | named("not-positive", "in", {"sizes_N6": spoilt_N6})
    for case, sizes in LAYOUTS.items():
        found |= named(case, "in", {"sizes_6": sizes})
    return found


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return validity, and for every layout the ranks of all groups of every name, one group after the other."""
    found: dict[str, Tensor] = {}
    for case in ("sizes", "not-positive"):
        sizes_N6 = inputs[f"{case}/in/sizes_N6"].tolist()
        found |= named(case, "out", {"valid_N": [oracle.valid(*sizes) is None for sizes in sizes_N6]})
    for case in LAYOUTS:
        made = oracle.groups(*inputs[f"{case}/in/sizes_6"].tolist())
        in_groups_GW = [[rank for group in made[name] for rank in group] for name in NAMES]
        found |= named(case, "out", {"ranks_GW": in_groups_GW, "group-size_G": [len(made[name][0]) for name in NAMES]})
    return found


CHAPTER = Chapter(2407, ("GROUP-01", "GROUP-02"), functions(members), draw, work_out)
