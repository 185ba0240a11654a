"""The goldens of padding are what the longhand makes of the stored inputs, of real tokens alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from goldens.chapters.packing import ALIGNMENTS, BOUNDS, GROUPS, PADDED, PLACES, REFUSALS, A
from self_tests.golden_layer import experts_of, stacked, tokens_of
from self_tests.golden_twins import assert_twins, given, stored, told
from self_tests.oracles import layer, packing
from self_tests.oracles.experts import SwiGLU


def of_counts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Counts rounded up, and those of a configured bound, which are the same."""
    counts = values["counts/in/counts_N"].tolist()
    aligned = [[packing.next_multiple(count, unit) for count in counts] for unit in ALIGNMENTS]
    by_default = [packing.next_multiple(count, 64) for count in counts]
    return told("counts", {"aligned_AN": aligned, "bounded_AN": aligned, "by-default_N": by_default})


def of_groups(tokens: Sequence[int], groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What the ranks of each group pad to, and may refuse."""
    return {
        "padded_W": packing.common_counts(tokens, groups, A),
        "with-a-row_W": packing.common_counts(tokens, groups, A, at_least_one=True),
        "may-refuse-unequal_G": packing.unequal(tokens, groups),
        "legal_BRG": [
            [packing.refusals_are_legal(refused, tokens, groups, bound, A) for refused in REFUSALS] for bound in BOUNDS
        ],
    }


def of_padding(own: Mapping[str, Any], lead: Sequence[int], rows: int) -> dict[str, Any]:
    """Rows that are appended and cut, and what comes back."""
    padded = packing.with_padding(tokens_of(own), rows)
    T = len(own["x_TD"])
    return {
        "pad.x_PD": padded.x_TD,
        "pad.ids_PK": padded.ids_TK,
        "pad.weights_PK": padded.weights_TK,
        "pad.dx_TD": packing.cut_back(own["rows_PD"], (T,)),
        "pad.dweights_TK": packing.cut_back(own["rows_PK"], (T,)),
        "trim.y_LD": packing.cut_back(own["rows_PD"], lead),
        "trim.drows_PD": packing.restored(own["dy_TD"], rows),
    }


def of_layer(own: Mapping[str, Any], experts: Sequence[SwiGLU], lead: Sequence[int]) -> dict[str, Any]:
    """The layer without any padding, in the shape that was asked for."""
    found = {}
    shape = (*lead, own["dy_TD"].shape[1])
    for place in PLACES:
        (y_TD,) = layer.forward([tokens_of(own)], experts, place)
        made = layer.backward([tokens_of(own)], experts, place, [own["dy_TD"]])
        answers = {"y_LD": y_TD.reshape(shape), "dx_LD": made.dx[0].reshape(shape), "dweights_TK": made.dweights[0]}
        found |= {f"{place}.{name}": value for name, value in (answers | stacked(made.experts)).items()}
    return found


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored count, verdict, output and gradient."""
        values = stored("packing")
        answers = of_counts(values)
        for case, groups in GROUPS.items():
            answers |= told(case, of_groups(values[f"{case}/in/tokens_W"].tolist(), groups))
        for case, (lead, rows) in PADDED.items():
            own = given(values, case)
            answers |= told(case, of_padding(own, lead, rows) | of_layer(own, experts_of(values), lead))
        assert_twins("packing", answers)
