"""Linear layers of Megatron-Core that defer weight gradients, as those of Transformer Engine do.

The library's own layers do not: their `backward_dw` does nothing. These are its own layers with the product of a
stand-in, on one rank of tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_conformance.backends.megatron_core import library
from moe_conformance.stand_ins.delayed_weights import Delays


class _Delaying(Delays):
    """The product of a layer of the library; biases are added by it as before."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.begin_delays()

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        y = self.product(input)
        return y if bias is None else y + bias


class _Column(_Delaying, library.ColumnParallelLinear):  # type: ignore[misc]
    """In the place of TEColumnParallelLinear."""


class _Row(_Delaying, library.RowParallelLinear):  # type: ignore[misc]
    """In the place of TERowParallelLinear."""


class Provider(library.LocalSpecProvider):  # type: ignore[misc]
    """The library's own provider of local layers, with these linear ones."""

    def column_parallel_linear(self) -> type:
        """Of shared experts."""
        return _Column

    def row_parallel_linear(self) -> type:
        """Of shared experts."""
        return _Row

    def grouped_mlp_modules(self, *asked: bool) -> Any:
        """Return SequentialMLP with these layers; a pair in 0.16, a partial since."""
        found = super().grouped_mlp_modules(*asked)
        if isinstance(found, tuple):
            return found[0], replace(found[1], linear_fc1=_Column, linear_fc2=_Row)
        parts = replace(found.keywords["submodules"], linear_fc1=_Column, linear_fc2=_Row)
        return partial(found.func, submodules=parts)


def settle(module: nn.Module, enabled: bool) -> None:
    """Let all layers of a module defer their weight gradients, or compute them in the backward."""
    for layer in module.modules():
        if isinstance(layer, _Delaying):
            layer.wgrad_store.enabled = enabled


@contextmanager
def delaying(module: nn.Module) -> Iterator[None]:
    """Let all layers defer their weight gradients until the block is left.

    What is still pending then stays in the stores, and is missing in the gradients.
    """
    settle(module, True)
    try:
        yield
    finally:
        settle(module, False)
