"""Expert forms: how the same gate, up and down of E experts are stored, and how one form becomes another.

One tensor per expert or one stacked tensor, gate and up apart or fused (in halves or interleaved), transposed
or not. All of it moves elements and casts none: bits stay bits, of parameters and of optimiser state alike.

Sources: behaviour of Megatron-Core (sequential and grouped experts) and of transformers (fused gate and up).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_conformance.reference.experts import Parameters

Fused = Literal["halves", "interleaved"]


@dataclass(frozen=True)
class Form:
    """How experts are stored.

    Attributes:
        stacked: one tensor (E, ., .) for all experts, named "down"; else one each, named "0.down", "1.down", ...
        fused: gate and up in one matrix "gate_up" (2F, D), and in which order of rows; None keeps them apart.
        transposed: the two last dimensions exchanged, in every tensor.
    """

    stacked: bool = False
    fused: Fused | None = None
    transposed: bool = False


def fuse_gate_up(gate_FD: Tensor, up_FD: Tensor, how: Fused) -> Tensor:
    """Put gate and up into one matrix, (2F, D): "halves" is [gate; up], "interleaved" gate_0, up_0, gate_1, ...

    Degenerate: with F = 1 the two are the same.

    Raises:
        ValueError: shapes or dtypes that differ, or an unknown order.

    Decides: CKPT-10. Source: a permutation of elements.

    >>> gate, up = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]])
    >>> fuse_gate_up(gate, up, "halves")[:, 0].tolist(), fuse_gate_up(gate, up, "interleaved")[:, 0].tolist()
    ([1, 3, 5, 7], [1, 5, 3, 7])
    """
    if gate_FD.shape != up_FD.shape:
        raise ValueError(f"gate {tuple(gate_FD.shape)} and up {tuple(up_FD.shape)} differ in shape")
    if gate_FD.dtype != up_FD.dtype:
        raise ValueError(
            f"gate {gate_FD.dtype} and up {up_FD.dtype} differ in dtype; one matrix would cast one of them"
        )
    if how == "halves":
        return torch.cat([gate_FD, up_FD])  # (2F, D)
    if how == "interleaved":
        return torch.stack([gate_FD, up_FD], dim=1).flatten(0, 1)  # (2F, D)
    raise ValueError(f"gate and up are fused in halves or interleaved, not {how!r}")


def split_gate_up(fused_2FD: Tensor, how: Fused) -> tuple[Tensor, Tensor]:
    """Take gate and up, (F, D) each, out of one matrix; undoes `fuse_gate_up`.

    Raises:
        ValueError: an odd number of rows, or an unknown order.

    Decides: CKPT-10. Source: a permutation of elements.

    >>> gate, up = split_gate_up(torch.tensor([[1], [5], [3], [7]]), "interleaved")
    >>> gate.tolist(), up.tolist()
    ([[1], [3]], [[5], [7]])
    """
    if fused_2FD.shape[0] % 2:
        raise ValueError(f"{fused_2FD.shape[0]} rows cannot be gate and up: they have as many rows each")
    F = fused_2FD.shape[0] // 2
    if how == "halves":
        return fused_2FD[:F], fused_2FD[F:]
    if how == "interleaved":
        return fused_2FD[0::2], fused_2FD[1::2]
    raise ValueError(f"gate and up are fused in halves or interleaved, not {how!r}")


def shard_gate_up(fused_2FD: Tensor, how: Fused, part: int, parts: int) -> Tensor:
    """Cut one etp shard out of a fused matrix, (2F, D) -> (2F / parts, D), fused in the same order.

    Rule: gate and up are cut each, rows part * F/parts onwards, not their concatenation.

    Degenerate: one part is the whole.

    Raises:
        ValueError: F not a multiple of the parts, a part that is not one of them, and as `split_gate_up`.

    Decides: CKPT-10. Source: a shard of an expert has the same rows of gate and of up.

    >>> fused = torch.tensor([[1], [2], [3], [4], [5], [6], [7], [8]])
    >>> shard_gate_up(fused, "halves", 1, 2).tolist()
    [[3], [4], [7], [8]]
    """
    gate_FD, up_FD = split_gate_up(fused_2FD, how)
    F = gate_FD.shape[0]
    if not 0 <= part < parts or F % parts:
        raise ValueError(f"part {part} of {parts} of F = {F} rows: need 0 <= part < parts, and equal parts")
    size = F // parts
    rows = slice(part * size, (part + 1) * size)
    return fuse_gate_up(gate_FD[rows], up_FD[rows], how)


def to_form(parameters: Parameters, form: Form) -> dict[str, Tensor]:
    """Store experts in a form, by tensor name.

    Args:
        parameters: "gate" (F, D), "up" (F, D) and "down" (D, F) of each of the experts 0 .. E - 1.
        form: which tensors there are, and how they lie.

    Degenerate: E = 1 stacked has a leading dimension of 1.

    Raises:
        ValueError: experts that are not 0 .. E - 1 with exactly these three each; shapes that do not fit.

    Decides: CKPT-10. Source: a permutation of elements.

    >>> p = {(name, e): torch.zeros(3, 2) for name in ("gate", "up") for e in (0, 1)}
    >>> p |= {("down", e): torch.zeros(2, 3) for e in (0, 1)}
    >>> {name: tuple(value.shape) for name, value in to_form(p, Form(True, "halves", True)).items()}
    {'gate_up': (2, 2, 6), 'down': (2, 3, 2)}
    """
    E = len({e for _, e in parameters})
    if not E or set(parameters) != {(name, e) for name in ("gate", "up", "down") for e in range(E)}:
        raise ValueError(f"need gate, up and down of experts 0 .. E - 1, not {sorted(parameters)}")
    by_expert: list[dict[str, Tensor]] = []
    for e in range(E):
        gate_FD, up_FD, down_DF = (parameters[name, e] for name in ("gate", "up", "down"))
        tensors = {"gate": gate_FD, "up": up_FD, "down": down_DF}
        if form.fused is not None:
            tensors = {"gate_up": fuse_gate_up(gate_FD, up_FD, form.fused), "down": down_DF}
        if form.transposed:
            tensors = {name: value.mT for name, value in tensors.items()}
        by_expert.append(tensors)
    if form.stacked:
        return {name: _stack(name, [tensors[name] for tensors in by_expert]) for name in by_expert[0]}
    return {f"{e}.{name}": value for e, tensors in enumerate(by_expert) for name, value in tensors.items()}


def from_form(tensors: Mapping[str, Tensor], form: Form) -> dict[tuple[str, int], Tensor]:
    """Read experts from a form, by (name, global expert id); undoes `to_form`.

    Raises:
        ValueError: a name that the form needs is missing, one is left over, stacks of different lengths, no expert.

    Decides: CKPT-10. Source: a permutation of elements.

    >>> stored = {"gate_up": torch.tensor([[[1, 5]], [[2, 6]]]), "down": torch.tensor([[[3]], [[4]]])}
    >>> {key: value.tolist() for key, value in from_form(stored, Form(True, "halves", True)).items() if key[1] == 1}
    {('gate', 1): [[2]], ('up', 1): [[6]], ('down', 1): [[4]]}
    """
    names = ("gate", "up", "down") if form.fused is None else ("gate_up", "down")
    if form.stacked:
        E = tensors["down"].shape[0] if "down" in tensors else 0
        wanted = set(names)
    else:
        E = len(tensors) // len(names)
        wanted = {f"{e}.{name}" for e in range(E) for name in names}
    if not E or set(tensors) != wanted:
        raise ValueError(f"the form has {sorted(wanted)} for {E} experts, not {sorted(tensors)}")
    if form.stacked and any(value.shape[0] != E for value in tensors.values()):
        raise ValueError(f"the stacks differ in length: {[value.shape[0] for value in tensors.values()]}")
    parameters: dict[tuple[str, int], Tensor] = {}
    for e in range(E):
        for name in names:
            value = tensors[name][e] if form.stacked else tensors[f"{e}.{name}"]
            value = value.mT if form.transposed else value
            if name == "gate_up" and form.fused is not None:
                parameters["gate", e], parameters["up", e] = split_gate_up(value, form.fused)
            else:
                parameters[name, e] = value
    return parameters


def _stack(name: str, values: list[Tensor]) -> Tensor:
    """Stack the experts' tensors, which must be of one shape and dtype."""
    if len({(value.shape, value.dtype) for value in values}) > 1:
        raise ValueError(f"{name} differs in shape or dtype between experts and cannot be stacked")
    return torch.stack(values)  # (E, ., .)
