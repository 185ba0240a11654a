"""Scripts for the load meter with conditions that must not change its values, and with passes that differ by rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from moe_conformance.chapters.overload.workloads.drawn import (
    EXPERTS,
    METER,
    Drawn,
    Passes,
    Recipe,
    Step,
    in_two,
    nothing,
    workload,
)
from moe_conformance.chapters.overload.workloads.steps import LAYOUTS
from moe_conformance.contract import MeteredPass
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_ETP2, TP2_EP2, Chapter
from moe_conformance.workloads.records.workload import Workload
from moe_conformance.workloads.selection.profiles import Profile


def _forms(drawn: Drawn) -> Passes:
    """Return passes of tokens in two dimensions and in one, with padding: some, all, or no tokens on a rank."""
    first, second = drawn.layers
    masks = [torch.arange(8) >= 5 - drawn.rank, torch.full((4,), drawn.rank % 2 == 1)]
    ids = [drawn.ids(len(mask_T)).masked_fill(mask_T[:, None], -1) for mask_T in masks]
    forwards = (
        drawn.forward(first, 0, ids_TK=ids[0], padding_T=masks[0], lead=in_two),
        drawn.forward(second, 0, ids_TK=ids[1], padding_T=masks[1]),
        drawn.forward(first, 1, ids_TK=drawn.ids(2 + 4 * drawn.rank), lead=in_two),
        drawn.forward(second, 1, ids_TK=drawn.ids(0 if drawn.rank % 2 else 5)),
    )
    return (*forwards, *(MeteredPass("backward", entry.layer, entry.microbatch) for entry in reversed(forwards)))


def _received(first: int, last: int) -> Step:
    """Return a step in which few tokens go to one end of the group, and later many tokens to the other."""

    def step(drawn: Drawn) -> Passes:
        block = EXPERTS // drawn.layout.ep  # the experts of a rank

        def ids_at(place: int, tokens: int) -> torch.Tensor:
            return drawn.ids(tokens, within=block) + (EXPERTS - block if place else 0)

        layer = drawn.layers[0]
        found: list[MeteredPass] = []
        for microbatch, ids_TK in enumerate((ids_at(first, 2), ids_at(last, 6), drawn.ids(0))):
            found += [drawn.forward(layer, microbatch, ids_TK=ids_TK), MeteredPass("backward", layer, microbatch)]
        return tuple(found)

    return step


def _recomputed(drawn: Drawn) -> Passes:
    """Return two microbatches in flight, with one layer recomputed, then both layers, and evaluation between them."""
    (f0, b0), (f1, b1) = drawn.block(0, recomputed=(1,)), drawn.block(1, recomputed=(0, 1))
    (f2, b2) = drawn.block(2)
    mask_T = torch.arange(6) >= 4
    apart = drawn.forward(drawn.layers[0], 7, "evaluation", drawn.ids(9, within=2))
    padded = drawn.forward(drawn.layers[1], 8, ids_TK=drawn.ids(6).masked_fill(mask_T[:, None], -1), padding_T=mask_T)
    end = MeteredPass("backward", drawn.layers[1], 8)
    alone = drawn.forward(drawn.layers[1], 9, "alone")
    return (*f0, *f1, apart, *b0, *f2, padded, alone, end, *b1, *b2)


def _recomputed_alike(drawn: Drawn) -> Passes:
    """Return two microbatches in flight, the first one recomputed in both layers, and an evaluation between them."""
    (f0, b0), (f1, b1) = drawn.block(0, recomputed=(0, 1)), drawn.block(1)
    apart = drawn.forward(drawn.layers[0], 7, "evaluation", drawn.ids(9, within=2))
    return (*f0, *f1, apart, *b0, *b1)


def _uneven_slices(drawn: Drawn) -> Passes:
    """Return passes with one more microbatch on every second exchange group of a stage."""
    groups = drawn.layout.groups()
    group = next(ranks for ranks in groups["ep_etp"] if drawn.rank in ranks)
    blocks = [drawn.block(microbatch) for microbatch in range(1 + groups["ep_etp"].index(group) % 2)]
    return tuple(entry for forwards, backwards in blocks for entry in (*forwards, *backwards))


def _uneven_in_group(drawn: Drawn) -> Passes:
    """Return passes of which every first of two ranks has one more in training."""
    forwards, backwards = drawn.block(0)
    apart = drawn.forward(drawn.layers[0], 5, "evaluation" if drawn.rank % 2 else "alone")
    return (*forwards, *backwards, apart)


def _of_stage(stage: int, microbatches: int) -> Step:
    """Return a step in which one pipeline stage has passes and the others have none."""

    def step(drawn: Drawn) -> Passes:
        blocks = [drawn.block(microbatch) for microbatch in range(microbatches if drawn.stage == stage else 0)]
        return tuple(entry for forwards, backwards in blocks for entry in (*forwards, *backwards))

    return step


def _twice(drawn: Drawn) -> Passes:
    """Return the same passes at every call: two microbatches, and an entry without rows on some ranks."""
    drawn = Drawn("load-twice", drawn.rank, drawn.layout)
    (f0, b0), (f1, b1) = drawn.block(0), drawn.block(1, recomputed=(0,))
    few = drawn.forward(drawn.layers[0], 2, ids_TK=drawn.ids(3, within=2))
    return (*f0, *f1, *b0, few, MeteredPass("backward", drawn.layers[0], 2), *b1)


def _afterwards(drawn: Drawn) -> Passes:
    forwards, backwards = drawn.block(4)
    return (*forwards, *backwards)


def _of_other(drawn: Drawn) -> Passes:
    """Return the passes of another meter: other tokens, all for the first experts."""
    layer = drawn.layers[1]
    return drawn.forward(layer, 3, ids_TK=drawn.ids(9, within=2)), MeteredPass("backward", layer, 3)


_SCRIPTS: Mapping[str, Recipe] = {
    "load-recomputed": Recipe((_recomputed,), shows=("recomputation",)),
    # A meter that cannot tell repeated forwards has as many entries in each layer.
    "load-recomputed-alike": Recipe((_recomputed_alike,), shows=("recomputation",)),
    "load-received-nothing": Recipe((_received(0, 1), _received(1, 0)), shows=("ranks without rows",)),
    "load-idle-stage": Recipe((_of_stage(0, 2), nothing, _of_stage(1, 1)), stages=2, shows=("stages without entries",)),
    "load-uneven-ranks": Recipe((_uneven_slices, _uneven_in_group), may_raise=True, shows=("uneven ranks",)),
    "load-switched": Recipe((_twice, False, _twice, _twice, True, _afterwards), shows=("switching",)),
    "load-two-meters": Recipe(
        (_afterwards, nothing, _afterwards), beside=(_of_other, _of_other, nothing), shows=("another meter",)
    ),
    "load-padded-tokens": Recipe(
        (_forms,), {"padding.tokens": "group_max", "padding.alignment": 4}, shows=("forms of tokens", "padding")
    ),
    "load-padded-experts": Recipe((_forms,), {"capacity.padded": True}, shows=("padding",)),
}
_FORMS = {"load-forms": Recipe((_forms,), shows=("forms of tokens", "padding"))}
_COPIES = {"load-copies": Recipe((_forms,), {"token_copies": True}, shows=("forms of tokens",))}


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the scripts except those of `forms` and `copies`."""
    del profile
    if layout in LAYOUTS:
        for name, recipe in _SCRIPTS.items():
            if recipe.stages <= layout.pp:
                yield workload(name, recipe, variant, layout)


def forms(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the script of tokens in several forms, which every variant must count alike."""
    del profile
    if layout in _SENDING:
        for name, recipe in _FORMS.items():
            yield workload(name, recipe, variant, layout)


def copies(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the script of tokens that all ranks of a tp group hold."""
    del profile
    if layout == TP2_EP2:
        for name, recipe in _COPIES.items():
            yield workload(name, recipe, variant, layout)


_SENDING = (EP2, EP2_ETP2)
CHAPTERS = (
    Chapter((METER,), tuple(_SCRIPTS), scripts, quick=LAYOUTS),
    Chapter((METER,), tuple(_FORMS), forms, "every", quick=_SENDING),
    Chapter((METER,), tuple(_COPIES), copies, quick=(TP2_EP2,)),
)
