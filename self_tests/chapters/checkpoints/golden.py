"""Calls the second oracle of checkpoints as the recipes of its goldens call the first.

The second oracle moves the bits of numbers, as integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_conformance.goldens.chapters.checkpoints_forms import D, F
from self_tests.chapters.checkpoints.second import forms, parts, rules, upcycling
from self_tests.chapters.checkpoints.second.forms import Form
from self_tests.chapters.exchange.second import layer
from self_tests.chapters.experts.second import SwiGLU
from self_tests.chapters.groups.second.members import decode
from self_tests.goldens.second_oracles import differentiable, replaced, second_oracle

UNANSWERED = ("bits/out/same-others",)  # it is asked of numbers of one shape alone


def bits(value: Any) -> Any:
    """The value with the bits of float64 arrays in their place."""
    return replaced(value, np.ndarray, lambda array: array.copy().view(np.int64))


def on_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of bits as one of numbers."""

    def call(*arguments: Any, **options: Any) -> Any:
        found = function(*bits(arguments), **options)
        return replaced(found, np.ndarray, lambda array: array.copy().view(np.float64))

    return call


# ---- parts and places ----------------------------------------------------------------------------------------------


class Layout(parts.Layout):
    """A layout that says who holds what."""

    def held(self) -> Sequence[Sequence[int]]:
        """The experts of every ep place."""
        return self.dealt


def layout_of(world: int, ep: int, etp: int, experts: int, by_ep: Sequence[Sequence[int]] | None = None) -> Layout:
    """A layout whose experts are dealt out as given, or in equal runs."""
    found = parts.in_runs(world, ep, etp, experts) if by_ep is None else parts.Layout(world, ep, etp, by_ep)
    parts.must_be_filled(found, experts)
    return Layout(*found)


def coordinates(rank: int, layout: Layout) -> list[int]:
    """The places of a rank along etp, ep and edp."""
    edp = layout.world // layout.ep // layout.etp
    place = decode(rank, (("etp", layout.etp), ("ep", layout.ep), ("edp", edp)))
    return [place[axis] for axis in ("etp", "ep", "edp")]


def same_bits(one: Any, other: Any) -> bool:
    """Whether two ranks that hold these agree."""
    try:
        parts.agreed([one, other])
    except ValueError:
        return False
    return True


def upcycled_backward(dy_TD: Any, x_TD: Any, weights_TK: Any, *dense: Any) -> list[Any]:
    """Gradients of a layer whose every slot names the one MLP."""
    tokens = layer.Tokens(x_TD, np.zeros(weights_TK.shape, dtype=np.int64), weights_TK)
    made = layer.backward([tokens], [SwiGLU(*dense)], "output", [dy_TD])
    return [made.dx[0], made.dweights[0], *made.experts[0]]


# ---- forms ---------------------------------------------------------------------------------------------------------


def split_gate_up(fused_2FD: Any, fused: str) -> tuple[Any, Any]:
    """Gate and up of a fused matrix, beside a down of zeros."""
    file = {"0.gate_up": fused_2FD, "0.down": np.zeros((D, F), dtype=np.int64)}
    found = forms.read(file, Form(False, fused, False), 1, F, D)
    return found["gate", 0], found["up", 0]


def fuse_gate_up(gate_FD: Any, up_FD: Any, fused: str) -> Any:
    """The fused matrix of gate and up."""
    return forms.stored({("gate", 0): gate_FD, ("up", 0): up_FD}, Form(False, fused, False))["0.gate_up"]


def shard_gate_up(fused_2FD: Any, fused: str, part: int, parts: int) -> Any:
    """One part of a fused matrix."""
    return forms.fused_part(*split_gate_up(fused_2FD, fused), fused, part, parts)


def from_form(tensors: Mapping[str, Any], form: Form) -> dict[parts.Key, Any]:
    """The parameters in a file."""
    experts = len(tensors["down"]) if form.stacked else sum(name.endswith(".down") for name in tensors)
    return forms.read(tensors, form, experts, F, D)


ORACLE = second_oracle(
    Layout=layout_of,
    coordinates=coordinates,
    shard=on_bits(parts.dealt_out),
    assemble=on_bits(parts.gathered),
    reshard=on_bits(lambda ranks, before, after: parts.dealt_out(parts.gathered(ranks, before), after)),
    agreed=on_bits(parts.agreed),
    same_bits=on_bits(same_bits),
    upcycle=on_bits(upcycling.upcycled),
    upcycled_output=differentiable(
        lambda x_TD, weights_TK, *dense: upcycling.upcycled_output(x_TD, weights_TK, SwiGLU(*dense)), upcycled_backward
    ),
    at_places=on_bits(upcycling.at_places),
    loads_by_expert=upcycling.loads,
    Form=Form,
    split_gate_up=on_bits(split_gate_up),
    fuse_gate_up=on_bits(fuse_gate_up),
    shard_gate_up=on_bits(shard_gate_up),
    to_form=on_bits(forms.stored),
    from_form=on_bits(from_form),
    same_names=rules.all_alike,
    collisions=rules.shared_addresses,
    Part=rules.Written,
    times_written=lambda written, shapes: rules.times_written(bits(written), shapes),
    misfits=rules.misfits,
    conversion_faults=lambda *names, **unused: tuple(rules.conversion_faults(*names, **unused).values()),
)
