"""Scripts for the load meter with schedules of passes: 1F1B, all forwards first, interleaved layers, and others.

Conditions other than schedules, such as padding, recomputation or another meter, are in `conditions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from moe_conformance.chapters.overload.workloads.drawn import (
    EXPERTS,
    METER,
    TOP_K,
    Drawn,
    Passes,
    Recipe,
    nothing,
    one,
    workload,
)
from moe_conformance.contract import MeteredPass
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, EP2_ETP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile

PP2_EP2 = Layout(4, pp=2, ep=2)
LAYOUTS = (SINGLE, EP2, EP2_EDP2, TP2_EP2, EP2_ETP2, PP2_EP2)


def _even(drawn: Drawn) -> Tensor:
    return torch.arange(3 * EXPERTS).remainder(EXPERTS).reshape(-1, TOP_K)


def _uneven_tokens(drawn: Drawn) -> Tensor:
    """Return ids that load all experts evenly, of 12 tokens on even and 100 on odd ranks."""
    return torch.arange(TOP_K * (100 if drawn.rank % 2 else 12)).remainder(EXPERTS).reshape(-1, TOP_K)


def _dropped(drawn: Drawn) -> Passes:
    ids_TK = drawn.ids(9)
    ids_TK[::3, 0], ids_TK[4] = -1, -1
    return drawn.forward(drawn.layers[0], 0, ids_TK=ids_TK), MeteredPass("backward", drawn.layers[0])


def _forwards_first(drawn: Drawn) -> Passes:
    blocks = [drawn.block(microbatch) for microbatch in range(3)]
    passes: list[MeteredPass] = []
    for forwards, _ in blocks:
        passes += forwards
    for _, backwards in blocks:
        passes += backwards
    return tuple(passes)


def _one_f_one_b(drawn: Drawn) -> Passes:
    (f0, b0), (f1, b1), (f2, b2) = (drawn.block(microbatch) for microbatch in range(3))
    return (*f0, *f1, *b0, *f2, *b1, *b2)


def _uneven_layers(drawn: Drawn) -> Passes:
    first, second = drawn.layers
    uses = ((first, 0), (first, 1), (second, 0), (first, 2), (second, 1))
    forwards = tuple(drawn.forward(layer, microbatch) for layer, microbatch in uses)
    return (*forwards, *(MeteredPass("backward", layer, microbatch) for layer, microbatch in reversed(uses)))


def _more_in_one_layer(drawn: Drawn) -> Passes:
    """Return a step whose number of entries is a multiple of the number of layers, of which one has three."""
    first, second = drawn.layers
    uses = ((first, 0), (first, 1), (second, 0), (first, 2))
    forwards = tuple(drawn.forward(layer, microbatch) for layer, microbatch in uses)
    return (*forwards, *(MeteredPass("backward", layer, microbatch) for layer, microbatch in reversed(uses)))


def _alone(drawn: Drawn) -> Passes:
    (f0, b0), (f1, b1) = drawn.block(0), drawn.block(1)
    apart = tuple(drawn.forward(layer, 5, "alone") for layer in drawn.layers)
    return (*f0, *apart, *f1, *b1, *b0)


def _evaluated(drawn: Drawn) -> Passes:
    (f0, b0), (f1, b1) = drawn.block(0), drawn.block(1)
    apart = tuple(drawn.forward(layer, 7, "evaluation", drawn.ids(11, within=2)) for layer in drawn.layers)
    return (*f0, *apart, *b0, *f1, *b1, *apart)


def _abandoned(drawn: Drawn) -> Passes:
    lost = [drawn.forward(layer, 9, ids_TK=drawn.ids(11, within=2)) for layer in drawn.layers]
    return (*lost, MeteredPass("backward", drawn.layers[1], 9), MeteredPass("abandon"), *_one_f_one_b(drawn))


def _interleaved(drawn: Drawn) -> Passes:
    """Return two microbatches through two virtual stages of one layer, each of which runs both in turn.

    The peak comes after a backward that frees the smallest entry in flight, as the first experts then get all tokens.
    """
    first, second = drawn.layers
    tokens = {(first, 0): 11, (first, 1): 5, (second, 0): 1, (second, 1): 9}
    forwards = [(layer, microbatch) for layer in (first, second) for microbatch in (0, 1)]
    backwards = [(layer, microbatch) for layer in (second, first) for microbatch in (0, 1)]
    ran = {
        place: drawn.forward(*place, ids_TK=drawn.ids(tokens[place], within=2 if place == forwards[3] else EXPERTS))
        for place in forwards
    }
    back = [MeteredPass("backward", *place) for place in backwards]
    return (*(ran[place] for place in forwards[:3]), back[0], ran[forwards[3]], *back[1:])


def _empty_entries(drawn: Drawn) -> Passes:
    """Return entries without tokens in flight with others, in a layer that has others and in one that has none."""
    first, second = drawn.layers
    tokens = {(first, 0): 3, (first, 1): 0, (second, 0): 0}
    forwards = tuple(drawn.forward(*place, ids_TK=drawn.ids(T)) for place, T in tokens.items())
    return (*forwards, *(MeteredPass("backward", *place) for place in tokens))


_SCRIPTS: Mapping[str, Recipe] = {
    "load-entries": Recipe((
        one(_even), one(lambda drawn: drawn.ids(5, within=2)),
        one(lambda drawn: drawn.ids(3 + 8 * (drawn.rank % 2))),
        one(lambda drawn: drawn.ids(6 * (drawn.rank % 2))), one(lambda drawn: drawn.ids(0)), _empty_entries,
    ), shows=("steps of one entry",)),
    # A meter that raises for uneven layers is judged by these two.
    "load-entries-one-by-one": Recipe((
        one(_even), one(lambda drawn: drawn.ids(5, within=2)), one(lambda drawn: drawn.ids(3 + 8 * (drawn.rank % 2))),
        one(lambda drawn: drawn.ids(6 * (drawn.rank % 2))), one(lambda drawn: drawn.ids(0)),
    ), shows=("steps of one entry",)),
    "load-more-in-one-layer": Recipe((_more_in_one_layer,), shows=("uneven layers",)),
    "load-dropped": Recipe(
        (_dropped, one(lambda drawn: torch.full((3, TOP_K), -1))), shows=("dropped pairs",)
    ),
    "load-steps": Recipe((
        _forwards_first, _one_f_one_b, nothing, _uneven_layers, _interleaved, one(lambda drawn: drawn.ids()),
    ), shows=("schedules", "uneven layers")),
    # A meter that raises for uneven layers, or repeats a report, is judged by these.
    "load-schedules": Recipe(
        (_forwards_first, _one_f_one_b, _interleaved, one(lambda drawn: drawn.ids())), shows=("schedules",)
    ),
    "load-reused-buffers": Recipe((_forwards_first, _one_f_one_b), shows=("reused buffers",)),
    "load-uneven-tokens": Recipe((one(_uneven_tokens),), shows=("uneven tokens",)),
    "load-alone": Recipe((_alone,), shows=("no backward",)),
    "load-evaluation": Recipe((_evaluated,), shows=("evaluation",)),
    "load-abandoned": Recipe((_abandoned,), shows=("abandoned attempt",)),
}  # fmt: skip


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts on the layouts in `LAYOUTS`."""
    del profile
    if layout in LAYOUTS:
        for name, recipe in _SCRIPTS.items():
            yield workload(name, recipe, variant, layout)


CHAPTERS = (Chapter((METER,), tuple(_SCRIPTS), scripts, quick=LAYOUTS),)
