"""The goldens of the rules of checkpoints are what the longhand says of the stored names and boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_conformance.goldens.chapters.checkpoints_rules import (
    KEYS,
    NAMES,
    TENSORS,
    addresses_of,
    boxes_of,
    listed,
    shapes_of,
)
from self_tests.chapters.checkpoints.second import rules
from self_tests.goldens.golden_twins import assert_twins, given, stored, told


def marked(names: Sequence[str]) -> list[int]:
    """How often each letter is named."""
    return [list(names).count(name) for name in NAMES]


def of_boxes(own: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """How often each element is written; other numbers stand for other bits."""
    parts = [
        rules.Written("it", start, np.full(size, fill))
        for (start, size), fill in zip(boxes_of(own["boxes_N"].tolist()), own["fill_N"].tolist(), strict=True)
    ]
    return {"times": rules.times_written(parts, {"it": shape})["it"]}


def of_misfits(own: Mapping[str, Any]) -> dict[str, Any]:
    """What is missing, left over, of another shape."""
    columns = (own[f"{name}_MN"].tolist() for name in ("needed", "found", "optional"))
    found = [
        rules.misfits(shapes_of(needed), shapes_of(held), listed(optional))
        for needed, held, optional in zip(*columns, strict=True)
    ]
    return {"misfits_M3N": [[marked(names) for names in each] for each in found]}


def of_conversion(own: Mapping[str, Any]) -> dict[str, Any]:
    """What a conversion did wrong."""
    columns = (own[f"{name}_MN"].tolist() for name in ("used", "present", "filled", "needed", "unused"))
    found = [rules.conversion_faults(*map(listed, each)) for each in zip(*columns, strict=True)]
    return {"faults_M6N": [[marked(names) for names in each.values()] for each in found]}


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored verdict, collision, count and fault."""
        values = stored("checkpoints_rules")
        shapes = [shapes_of(sizes) for sizes in values["layouts/in/sizes_LN"].tolist()]
        same = [[rules.all_alike([one, other]) for other in shapes] for one in shapes]
        answers = told("layouts", {"same_LL": same, "all-same": rules.all_alike(shapes)})
        addresses = addresses_of(values["addresses/in/name-index_K2"].tolist())
        pairs = [[KEYS.index(a), KEYS.index(b)] for a, b in rules.shared_addresses(addresses)]
        answers |= told("addresses", {"collisions_C2": pairs})
        for case, shape in TENSORS.items():
            answers |= told(case, of_boxes(given(values, case), shape))
        answers |= told("misfits", of_misfits(given(values, "misfits")))
        answers |= told("conversion", of_conversion(given(values, "conversion")))
        assert_twins("checkpoints_rules", answers)
