"""Lets the recipe of a golden call a second oracle: tensors become arrays, its gradients by hand those of autograd.

Each chapter's `golden.py` says which function of its second oracle stands for which one of reference/. It reorders
arguments and renames results; what an oracle has to compute stays in the second oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_conformance.goldens.chapter import Oracle, functions


def second_oracle(*modules: ModuleType, **others: Any) -> Oracle:
    """Return an oracle for recipes: what the modules define, and the others, which may replace some of that."""
    return Oracle(**{name: taking_tensors(each) for name, each in {**vars(functions(*modules)), **others}.items()})


def taking_tensors(function: Any) -> Any:
    """Return the function of arrays as one of tensors; one of `differentiable` is so already."""
    if getattr(function, "takes_tensors", False):
        return function
    return lambda *arguments, **options: tensors(function(*arrays(arguments), **arrays(options)))


def with_tensors(function: Any) -> Any:
    """Mark a function that takes tensors itself."""
    function.takes_tensors = True
    return function


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Return the function of tensors whose gradient autograd takes from the second oracle.

    Args:
        forward: Returns one array or number, or a list of arrays, of the arguments.
        backward: Is handed the upstream gradient, an array or a list of arrays, then the arguments. Returns a list of
            the gradients of those tensors in the arguments that require one, in their order.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        class ByHand(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *leaves: Tensor) -> Any:
                found = forward(*arrays(arguments), **arrays(options))
                several = isinstance(found, list)
                ctx.several = several
                outputs = [torch.from_numpy(np.array(each)) for each in (found if several else [found])]
                return tuple(outputs) if several else outputs[0]

            @staticmethod
            def backward(ctx: Any, *upstream: Tensor) -> Any:
                handed = arrays(list(upstream) if ctx.several else upstream[0])
                found = backward(handed, *arrays(arguments), **arrays(options))
                return tuple(torch.from_numpy(np.array(each)) for each in found)

        leaves = [each for each in tensors_in(arguments) if each.requires_grad]
        return ByHand.apply(*leaves)  # type: ignore[no-untyped-call]

    return with_tensors(call)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)


def arrays(value: Any) -> Any:
    """Return the value with an array of its own in the place of every tensor."""
    return replaced(value, Tensor, lambda tensor: tensor.detach().clone().numpy())


def tensors(value: Any) -> Any:
    """Return the value with a tensor in the place of every array."""
    return replaced(value, np.ndarray, torch.from_numpy)


def replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Return nested lists, tuples and mappings with the values of a type replaced."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, Mapping):
        return {key: replaced(each, kind, by) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        found = [replaced(each, kind, by) for each in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    return value
