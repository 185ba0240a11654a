"""Golden of the rules of checkpoints: names that collide, elements written twice or never, what does not fit.

Names are letters. What is stored of a name is at its place in the alphabet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, named
from moe_conformance.reference.checkpoints import rules

NAMES = "abcdefgh"
KEYS = tuple(product((0, 1), (0, 1, 2), ("down", "up")))  # layer, expert, parameter
LAYOUTS = (0, 1, 0, 2, 1, 0)  # which of three checkpoints each layout saves
TENSORS = {"matrix": (4, 5), "vector": (7,), "nothing": (0, 3)}
FILLS = (0.0, -0.0)  # other bits, so no copies


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return sizes (0: the name is not there), addresses, boxes of which some are copies, and uses of names."""
    N, drawn = len(NAMES), 6
    sizes_3N = rng.choice([0, 2, 3], size=(3, N))
    sizes_3N[2] = np.where(sizes_3N[0], 5 - sizes_3N[0], 0)  # the names of the first, and other shapes
    found = named("layouts", "in", {"sizes_LN": sizes_3N[list(LAYOUTS)]})
    found |= named("addresses", "in", {"name-index_K2": rng.integers((0, -1), (4, 3), size=(len(KEYS), 2))})
    for case, shape in TENSORS.items():
        starts = [rng.integers(0, max(1, total), size=9) if total else np.zeros(9, np.int64) for total in shape]
        sizes = [rng.integers(0, total - start + 1) for total, start in zip(shape, starts, strict=True)]
        boxes_N = np.stack([*starts, *sizes], axis=1)[rng.integers(0, 9, size=14)]  # some of them more than once
        found |= named(case, "in", {"boxes_N": boxes_N, "fill_N": rng.integers(0, 2, 14)})
    misfits = {name: rng.choice([0, 2, 3], size=(drawn, N)) for name in ("needed_MN", "found_MN")}
    found |= named("misfits", "in", {**misfits, "optional_MN": rng.random((drawn, N)) < 0.3})
    uses = {name: rng.integers(0, 3, (drawn, N)) for name in ("used_MN", "filled_MN")}
    masks = {name: rng.random((drawn, N)) < 0.6 for name in ("present_MN", "needed_MN", "unused_MN")}
    found |= named("conversion", "in", {**uses, **masks})
    for values in found.values():
        if values.shape == (drawn, N):
            values[0] = 0  # no name at all
    return found


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return which layouts agree, which keys collide, how often elements are written, and faults by name."""
    shapes = [shapes_of(sizes) for sizes in inputs["layouts/in/sizes_LN"].tolist()]
    same_LL = [[oracle.same_names([one, other]) for other in shapes] for one in shapes]
    found = named("layouts", "out", {"same_LL": same_LL, "all-same": oracle.same_names(shapes)})
    collisions = oracle.collisions(addresses_of(inputs["addresses/in/name-index_K2"].tolist()))
    pairs_C2 = torch.tensor([[KEYS.index(a), KEYS.index(b)] for a, b in collisions]).reshape(-1, 2)
    found |= named("addresses", "out", {"collisions_C2": pairs_C2})
    for case, shape in TENSORS.items():
        boxes, fills = (inputs[f"{case}/in/{name}"].tolist() for name in ("boxes_N", "fill_N"))
        parts = [
            oracle.Part("it", start, torch.full(size, FILLS[fill], dtype=torch.float64))
            for (start, size), fill in zip(boxes_of(boxes), fills, strict=True)
        ]
        found |= named(case, "out", {"times": oracle.times_written(parts, {"it": shape})["it"]})
    misfits, drawn = [], _rows(inputs, "misfits")
    for needed, held, optional in zip(drawn["needed_MN"], drawn["found_MN"], drawn["optional_MN"], strict=True):
        misfits.append(oracle.misfits(shapes_of(needed), shapes_of(held), optional=listed(optional)))
    faults, drawn = [], _rows(inputs, "conversion")
    for used, present, filled, needed, unused in zip(
        *(drawn[f"{name}_MN"] for name in ("used", "present", "filled", "needed", "unused")), strict=True
    ):
        lists = listed(used), listed(present), listed(filled), listed(needed)
        faults.append(oracle.conversion_faults(*lists, unused=listed(unused)))
    found |= named("misfits", "out", {"misfits_M3N": [[_marked(names) for names in each] for each in misfits]})
    return found | named("conversion", "out", {"faults_M6N": [[_marked(names) for names in each] for each in faults]})


def shapes_of(sizes_N: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return the shapes of the names that are there."""
    return {name: (size, 5) for name, size in zip(NAMES, sizes_N, strict=True) if size}


def addresses_of(rows_K2: Sequence[Sequence[int]]) -> dict[tuple[int, int, str], tuple[str, int | None]]:
    """Return the place of every key; index -1 is the whole tensor."""
    places = [(NAMES[name], None if index < 0 else index) for name, index in rows_K2]
    return dict(zip(KEYS, places, strict=True))


def boxes_of(rows_N: Sequence[Sequence[int]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return where each box begins, and its sizes."""
    return [(tuple(box[: len(box) // 2]), tuple(box[len(box) // 2 :])) for box in rows_N]


def listed(times_N: Sequence[int]) -> list[str]:
    """Return every name as often as its number says."""
    return [name for name, times in zip(NAMES, times_N, strict=True) for _ in range(times)]


def _marked(names: Sequence[str]) -> list[int]:
    return [names.count(name) for name in NAMES]


def _rows(inputs: Mapping[str, Tensor], case: str) -> dict[str, list[list[int]]]:
    return {name: value.tolist() for name, value in given(inputs, case).items()}


CHAPTER = Chapter(2412, ("CKPT-02", "CKPT-03", "CKPT-08", "CKPT-11"), functions(rules), draw, work_out)
