"""Goldens of the forms in which experts are stored: every element's bits in every form, cut, written and read."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.bits import draw_bits, numbers, spelled
from moe_conformance.goldens.chapter import Chapter, given, named
from moe_conformance.reference.checkpoints import forms
from moe_conformance.reference.checkpoints.forms import Form, Fused

F, D = 4, 3
ORDERS: tuple[Fused, ...] = ("halves", "interleaved")
EXPERTS = {"experts": 2, "one-expert": 1}
PARTS = (1, 2, 4)
# By name; transposed forms are of the same numbers, read along the other dimension.
FORMS: Mapping[str, Form] = {
    f"{'stacked' if stacked else 'apart'}-{fused or 'unfused'}{'-transposed' if transposed else ''}": Form(
        stacked, fused, transposed
    )
    for stacked, fused, transposed in product((False, True), (None, *ORDERS), (False, True))
}


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return bits of gate, up and down of each expert, and of one fused matrix."""
    found = named("fused", "in", {"fused_2FD": draw_bits(rng, 2 * F, D)})
    for case, E in EXPERTS.items():
        shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
        found |= named(case, "in", {name: draw_bits(rng, *shape) for name, shape in shapes.items()})
    return found


def work_out(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors of every form, what is read from them, and the parts of a fused matrix."""
    found = named("fused", "out", _fused(numbers(inputs["fused/in/fused_2FD"])))
    for case, E in EXPERTS.items():
        stacks = {name: numbers(bits) for name, bits in given(inputs, case).items()}
        for name, form in FORMS.items():
            found |= named(f"{case}-{name}", "out", _written(stacks, form, E))
    return found


def _fused(fused_2FD: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for order in ORDERS:
        gate_FD, up_FD = forms.split_gate_up(fused_2FD, order)
        found |= {f"{order}.gate_FD": spelled(gate_FD), f"{order}.up_FD": spelled(up_FD)}
        found[f"{order}.again_2FD"] = spelled(forms.fuse_gate_up(gate_FD, up_FD, order))
        for parts in PARTS:
            cut = [forms.shard_gate_up(fused_2FD, order, part, parts) for part in range(parts)]
            found[f"{order}.of-{parts}"] = spelled(torch.stack(cut))
    return found


def _written(stacks: Mapping[str, Tensor], form: Form, E: int) -> dict[str, Tensor]:
    """Return the tensors of a file by name, those of experts apart stacked, and what is read from the file."""
    stored = forms.to_form({(name, e): stacks[name][e] for name in stacks for e in range(E)}, form)
    read = forms.from_form(stored, form)
    as_gate_3FD = [torch.stack([read["gate", e], read["up", e], read["down", e].T]) for e in range(E)]
    found = {"read_E3FD": torch.stack(as_gate_3FD)}
    for name in ("gate", "up", "down") if form.fused is None else ("gate_up", "down"):
        found[name] = stored[name] if form.stacked else torch.stack([stored[f"{e}.{name}"] for e in range(E)])
    return {name: spelled(value) for name, value in found.items()}


CHAPTER = Chapter(2411, ("CKPT-10",), draw, work_out)
