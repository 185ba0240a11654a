"""Padding by hand: of real tokens alone, for all that the golden asks."""

from __future__ import annotations

from typing import Any

from goldens.chapters.packing import ALIGNMENTS, BOUNDS, GROUPS, PADDED, PLACES, REFUSALS, A
from self_tests.goldens_longhand.padded_layer import Given, experts_of, stacked, tokens_of
from self_tests.oracles import layer
from self_tests.oracles import packing as second

UNANSWERED: tuple[str, ...] = ()


def work_out(given: Given) -> dict[str, Any]:
    """Counts and verdicts of groups, then what padding does to rows, the layer and gradients."""
    counts = given["counts/in/counts_N"].tolist()
    aligned = [[second.next_multiple(count, unit) for count in counts] for unit in ALIGNMENTS]
    found: dict[str, Any] = {"counts/out/aligned_AN": aligned, "counts/out/bounded_AN": aligned}
    found["counts/out/by-default_N"] = [second.next_multiple(count, 64) for count in counts]
    for case, groups in GROUPS.items():
        tokens = given[f"{case}/in/tokens_W"].tolist()
        found[f"{case}/out/padded_W"] = second.common_counts(tokens, groups, A)
        found[f"{case}/out/with-a-row_W"] = second.common_counts(tokens, groups, A, at_least_one=True)
        found[f"{case}/out/may-refuse-unequal_G"] = second.unequal(tokens, groups)
        found[f"{case}/out/legal_BRG"] = [
            [second.refusals_are_legal(refused, tokens, groups, bound, A) for refused in REFUSALS] for bound in BOUNDS
        ]
    for case, (lead, rows) in PADDED.items():
        made = {**padding(given, case, lead, rows), **padded_layer(given, case, lead)}
        found |= {f"{case}/out/{name}": value for name, value in made.items()}
    return found


def padding(given: Given, case: str, lead: tuple[int, ...], rows: int) -> dict[str, Any]:
    """Rows that are appended and cut, and what comes back."""
    tokens = tokens_of(given, case)
    T = len(tokens.x_TD)
    padded = second.with_padding(tokens, rows)
    rows_PD, rows_PK = given[f"{case}/in/rows_PD"], given[f"{case}/in/rows_PK"]
    return {
        "pad.x_PD": padded.x_TD,
        "pad.ids_PK": padded.ids_TK,
        "pad.weights_PK": padded.weights_TK,
        "pad.dx_TD": second.cut_back(rows_PD, (T,)),
        "pad.dweights_TK": second.cut_back(rows_PK, (T,)),
        "trim.y_LD": second.cut_back(rows_PD, lead),
        "trim.drows_PD": second.restored(given[f"{case}/in/dy_TD"], rows),
    }


def padded_layer(given: Given, case: str, lead: tuple[int, ...]) -> dict[str, Any]:
    """The layer without any padding, in the shape that was asked for."""
    found = {}
    tokens, experts, dy_TD = tokens_of(given, case), experts_of(given), given[f"{case}/in/dy_TD"]
    shape = (*lead, dy_TD.shape[1])
    for place in PLACES:
        made = layer.backward([tokens], experts, place, [dy_TD])
        found[f"{place}.y_LD"] = layer.forward([tokens], experts, place)[0].reshape(shape)
        found[f"{place}.dx_LD"], found[f"{place}.dweights_TK"] = made.dx[0].reshape(shape), made.dweights[0]
        found |= {f"{place}.{name}": gradient for name, gradient in stacked(made.experts).items()}
    return found
