"""A golden's recipe: which inputs it draws, and what an oracle is called with to work out the outputs.

A recipe is called with both oracles. `regenerate.py` calls it with the functions of reference/ and stores what it
returns; `self_tests/goldens/test_second_oracles.py` calls it with the second oracle and compares what it returns with
what is stored. So a recipe takes the oracle as an argument and calls nothing else to work out an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Oracle = SimpleNamespace
"""Functions and types by name. A second oracle has those of reference/ by the same names, with the same arguments."""


@dataclass(frozen=True)
class Chapter:
    """The recipe of one golden.

    Attributes:
        seed: The seed of the inputs.
        requirements: The ids that the oracle's functions decide.
        oracle: The functions of reference/ that `work_out` calls.
        draw: Returns the inputs by name, `case/in/quantity`.
        work_out: Returns the outputs by name, `case/out/quantity`, from the inputs and an oracle.
    """

    seed: int
    requirements: tuple[str, ...]
    oracle: Oracle
    draw: Callable[[np.random.Generator], Mapping[str, Tensor]]
    work_out: Callable[[Mapping[str, Tensor], Oracle], Mapping[str, Tensor]]


def functions(*modules: ModuleType) -> Oracle:
    """Return the public functions and types that these modules define.

    Raises:
        ValueError: Two modules define the same name.
    """
    found: dict[str, object] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__ or not callable(value):
                continue
            if name in found:
                raise ValueError(f"{module.__name__} defines {name}, and so does a module before it")
            found[name] = value
    return Oracle(**found)


# ---- names -------------------------------------------------------------------------------------------------------


def given(inputs: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """Return the inputs of one case by quantity."""
    start = f"{case}/in/"
    return {name.removeprefix(start): value for name, value in inputs.items() if name.startswith(start)}


def named(case: str, side: str, values: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the values of one case under their full names, as float64 or int64 tensors.

    Args:
        case: The first part of the names.
        side: "in" or "out".
        values: By quantity: a tensor, an array, a number, or nested sequences of these. A sequence without any number
            becomes int64; truth values become 0 and 1.
    """
    found = {}
    for quantity, value in values.items():
        tensor = _tensor(value)
        found[f"{case}/{side}/{quantity}"] = tensor.double() if tensor.is_floating_point() else tensor.long()
    return found


def prefixed(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values with a prefix and a dot before their names."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _tensor(value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        return torch.stack([_tensor(each) for each in value])
    array = np.array(_arrays(value))
    empty = not isinstance(value, np.ndarray) and array.size == 0
    return torch.from_numpy(array.astype(np.int64) if empty else array)


def _arrays(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().numpy()
    return [_arrays(each) for each in value] if isinstance(value, (list, tuple)) else value


def draw_ids(rng: np.random.Generator, T: int, K: int, E: int) -> NDArray[np.int64]:
    """Return the ids (T, K) of T tokens, all of a token different, about a fifth of the slots empty."""
    ids_TK = np.array([rng.permutation(E)[:K] for _ in range(T)], dtype=np.int64).reshape(T, K)
    return np.where(rng.random((T, K)) < 0.2, -1, ids_TK)


# ---- gradients ---------------------------------------------------------------------------------------------------


def leaf(value: Tensor) -> Tensor:
    """Return a copy that autograd differentiates by."""
    return value.detach().clone().requires_grad_()


def gradients(outputs: Sequence[Tensor], leaves: Mapping[str, Tensor], upstream: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the gradient of every leaf under its name with a d before it, zeros if no output depends on it."""
    for output in outputs:
        if not output.requires_grad:  # it has no element that depends on a leaf
            output.requires_grad_()
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True)
    return {f"d{name}": gradient for name, gradient in zip(leaves, found, strict=True)}


# ---- the small layer of several goldens: four SwiGLU experts, of which the last gets nothing ------------------------

K, E, D, F = 2, 4, 3, 5
EXPERT_SHAPES = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}


def draw_experts(rng: np.random.Generator) -> dict[str, Tensor]:
    """Return the parameters as inputs of the case `experts`."""
    return named("experts", "in", {name: rng.standard_normal(shape) for name, shape in EXPERT_SHAPES.items()})


def draw_tokens(rng: np.random.Generator, case: str, T: int) -> dict[str, Tensor]:
    """Return the inputs of a case: T tokens, slots that are empty or name an expert twice, an upstream gradient."""
    values = {"ids_TK": rng.integers(-1, E - 1, size=(T, K)), "x_TD": rng.standard_normal((T, D))}
    values |= {"weights_TK": rng.standard_normal((T, K)), "dy_TD": rng.standard_normal((T, D))}
    return named(case, "in", values)
