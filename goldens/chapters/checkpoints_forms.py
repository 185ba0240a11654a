"""Golden of the forms in which experts are stored: the bits of every element, written, read and cut."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter, Oracle, functions, given, named
from moe_conformance.reference.checkpoints import forms
from moe_conformance.reference.checkpoints.forms import Fused

F, D = 4, 3
ORDERS: tuple[Fused, ...] = ("halves", "interleaved")
EXPERTS = {"experts": 2, "one-expert": 1}
PARTS = (1, 2, 4)
# By name; transposed forms are of the same numbers, read along the other dimension.
FORMS: Mapping[str, tuple[bool, Fused | None, bool]] = {
    f"{'stacked' if stacked else 'apart'}-{fused or 'unfused'}{'-transposed' if transposed else ''}": (
        stacked, fused, transposed
    )
    for stacked, fused, transposed in product((False, True), (None, *ORDERS), (False, True))
}  # fmt: skip
SPECIAL = (0, -(2**63), 0x3FF0 << 48, 0x7FF8 << 48, (0x7FF8 << 48) + 1, 0x7FF0 << 48, 1)
"""The bits of 0.0, -0.0, 1.0, two NaN, infinity and the smallest subnormal."""


def draw_bits(rng: np.random.Generator, *shape: int) -> NDArray[np.int64]:
    """Return any bits, those of special numbers among them."""
    anything = rng.integers(-(2**63), 2**63 - 1, size=shape, endpoint=True)
    return np.where(rng.random(shape) < 0.3, rng.choice(np.array(SPECIAL), size=shape), anything)


def numbers(bits: Tensor) -> Tensor:
    """Return the float64 numbers that have these bits; goldens hold bits where NaN and -0.0 matter."""
    return bits.clone().view(torch.float64)


def spelled(values: Tensor) -> Tensor:
    """Return the bits of these float64 numbers, int64."""
    return values.contiguous().view(torch.int64)


def draw(rng: np.random.Generator) -> Mapping[str, Tensor]:
    """Return bits of gate, up and down of each expert, and of one fused matrix."""
    found = named("fused", "in", {"fused_2FD": draw_bits(rng, 2 * F, D)})
    for case, E in EXPERTS.items():
        shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
        found |= named(case, "in", {name: draw_bits(rng, *shape) for name, shape in shapes.items()})
    return found


def work_out(inputs: Mapping[str, Tensor], oracle: Oracle) -> Mapping[str, Tensor]:
    """Return the tensors of every form, what is read from them, and the parts of a fused matrix."""
    found = named("fused", "out", _fused(numbers(inputs["fused/in/fused_2FD"]), oracle))
    for case, E in EXPERTS.items():
        stacks = {name: numbers(bits) for name, bits in given(inputs, case).items()}
        for name, form in FORMS.items():
            found |= named(f"{case}-{name}", "out", _written(stacks, oracle.Form(*form), E, oracle))
    return found


def _fused(fused_2FD: Tensor, oracle: Oracle) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for order in ORDERS:
        gate_FD, up_FD = oracle.split_gate_up(fused_2FD, order)
        found |= {f"{order}.gate_FD": spelled(gate_FD), f"{order}.up_FD": spelled(up_FD)}
        found[f"{order}.again_2FD"] = spelled(oracle.fuse_gate_up(gate_FD, up_FD, order))
        for parts in PARTS:
            cut = [oracle.shard_gate_up(fused_2FD, order, part, parts) for part in range(parts)]
            found[f"{order}.of-{parts}"] = spelled(torch.stack(cut))
    return found


def _written(stacks: Mapping[str, Tensor], form: forms.Form, E: int, oracle: Oracle) -> dict[str, Tensor]:
    """Return the tensors of a file by name, those of experts apart stacked, and what is read from the file."""
    stored = oracle.to_form({(name, e): stacks[name][e] for name in stacks for e in range(E)}, form)
    read = oracle.from_form(stored, form)
    as_gate_3FD = [torch.stack([read["gate", e], read["up", e], read["down", e].T]) for e in range(E)]
    found = {"read_E3FD": torch.stack(as_gate_3FD)}
    for name in ("gate", "up", "down") if form.fused is None else ("gate_up", "down"):
        found[name] = stored[name] if form.stacked else torch.stack([stored[f"{e}.{name}"] for e in range(E)])
    return {name: spelled(value) for name, value in found.items()}


CHAPTER = Chapter(2411, ("CKPT-10",), functions(forms), draw, work_out)
