"""The goldens of checkpoints are what the longhand makes of the stored bits, copied address by address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moe_conformance.goldens.bits import SPECIAL
from moe_conformance.goldens.chapters.checkpoints import LAYOUTS, PIECES, PLACES, TOKENS, E, K
from moe_conformance.reference.checkpoints.layouts import Layout
from self_tests.chapters.checkpoints.second import parts, upcycling
from self_tests.chapters.exchange.second import layer
from self_tests.chapters.experts.second import SwiGLU
from self_tests.chapters.groups.second.members import decode
from self_tests.goldens.golden_layer import NAMES
from self_tests.goldens.golden_twins import assert_twins, given, stored, told


def stacked(word: str, held_by_rank: Sequence[Mapping[parts.Key, Any]]) -> dict[str, Any]:
    """By name: of rank 0 all experts by id, then of rank 1, and so on."""
    found: dict[str, Any] = {f"{word}.{name}": [] for held in held_by_rank for name, _ in held}
    for held in held_by_rank:
        for name, e in sorted(held):
            found[f"{word}.{name}"].append(held[name, e])
    return found


def of_layout(whole: Mapping[parts.Key, Any], layout: Layout) -> dict[str, Any]:
    """What every rank holds, loads and gives back: elements at their addresses, whoever saved them."""
    if layout.by_ep is None:
        mine = parts.in_runs(layout.world, layout.ep, layout.etp, E)
    else:
        mine = parts.Layout(layout.world, layout.ep, layout.etp, layout.by_ep)
    parts.must_be_filled(mine, E)
    edp = mine.world // mine.ep // mine.etp
    places = [decode(rank, (("etp", mine.etp), ("ep", mine.ep), ("edp", edp))) for rank in range(mine.world)]
    held = parts.dealt_out(whole, mine)
    return {
        "coordinates_W3": [[place[axis] for axis in ("etp", "ep", "edp")] for place in places],
        "dealt_E2": [[at_ep, e] for at_ep, experts in enumerate(mine.dealt) for e in experts],
        **stacked("held", held),
        **stacked("loaded", held),
        **stacked("assembled", [parts.gathered(held, mine)]),
    }


def of_places(whole: Mapping[parts.Key, Any], loads: Sequence[int]) -> dict[str, Any]:
    """Experts moved, and the loads of all their places."""
    cut = {key: value for key, value in whole.items() if key[0] in NAMES}
    return {**stacked("experts", [upcycling.at_places(cut, PLACES)]), "loads_E": upcycling.loads(loads, PLACES, E + 1)}


def of_upcycled(own: Mapping[str, Any]) -> dict[str, Any]:
    """One MLP in all slots; its gradients are those of a layer whose every slot names it."""
    dense = SwiGLU(*(own[name] for name in NAMES))
    tokens = layer.Tokens(own["x_TD"], np.zeros((len(own["x_TD"]), K), dtype=np.int64), own["weights_TK"])
    made = layer.backward([tokens], [dense], "output", [own["dy_TD"]])
    return {
        "y_TD": upcycling.upcycled_output(own["x_TD"], own["weights_TK"], dense),
        "dx_TD": made.dx[0],
        "dweights_TK": made.dweights[0],
        **{f"d{name}": gradient for name, gradient in zip(NAMES, made.experts[0], strict=True)},
    }


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored bit that a rank holds, every load, output and gradient."""
        values = stored("checkpoints")
        whole = {(name, e): bits for name, stack in given(values, "experts").items() for e, bits in enumerate(stack)}
        same = [[one == other for other in SPECIAL] for one in SPECIAL]  # integers are their bits
        answers = told("bits", {"same_NN": same, "agreed_N": parts.agreed([np.array(SPECIAL)] * 2)})
        for case, layout in LAYOUTS.items():
            answers |= told(case, of_layout(whole, layout))
        dense = given(values, "mlp")
        for pieces in PIECES:
            made = upcycling.upcycled(*(dense[name] for name in NAMES), E, pieces)
            answers |= told("mlp", stacked(f"pieces-{pieces}", [made]))
        answers |= told("places", of_places(whole, values["places/in/loads_P"].tolist()))
        for case in TOKENS:
            answers |= told(case, of_upcycled(given(values, case)))
        # Only the first oracle is asked of tensors of other shapes and dtypes.
        assert_twins("checkpoints", answers, unanswered=["bits/out/same-others"])
