"""Linear layers of Megatron-Core that defer weight gradients, as those of Transformer Engine do.

The library's own layers do not: their `backward_dw` does nothing. Shared experts get its own layers with the product of
a stand-in, on one rank of tp; routed experts are its TEGroupedMLP over stand-ins of grouped linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_conformance.backends.megatron_core import library
from moe_conformance.contract import Unsupported
from moe_conformance.stand_ins.delayed_weights import Delays, GroupedLinear


class _Delaying(Delays):
    """The product of a layer of the library; biases are added by it as before."""

    weight: nn.Parameter

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.begin_delays(self.weight)

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        y = self.product(input)
        return y if bias is None else y + bias


class _Column(_Delaying, library.ColumnParallelLinear):  # type: ignore[misc]
    """In the place of TEColumnParallelLinear."""


class _Row(_Delaying, library.RowParallelLinear):  # type: ignore[misc]
    """In the place of TERowParallelLinear."""


class _Experts(GroupedLinear):
    """What the two classes in the place of TE's grouped linear layers share: the weights of this rank's experts."""

    def __init__(self, experts: int, inputs: int, outputs: int, config: Any, bias: bool) -> None:
        if bias:
            raise Unsupported("the stand-in of grouped linear layers has no biases")
        super().__init__(experts, inputs, outputs, config.params_dtype)
        for weight in self.parameters():  # as TEGroupedLinear marks them for the reduction of gradients
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]


class _GroupedColumn(_Experts):
    """In the place of TEColumnParallelGroupedLinear; etp divides the outputs."""

    def __init__(
        self, experts: int, inputs: int, outputs: int, *, config: Any, bias: bool, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(experts, inputs, outputs // pg_collection.expt_tp.size(), config, bias)


class _GroupedRow(_Experts):
    """In the place of TERowParallelGroupedLinear; etp divides the inputs."""

    def __init__(
        self, experts: int, inputs: int, outputs: int, *, config: Any, bias: bool, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(experts, inputs // pg_collection.expt_tp.size(), outputs, config, bias)


class Provider(library.LocalSpecProvider):  # type: ignore[misc]
    """The library's own provider of local layers, with these linear ones."""

    def column_parallel_linear(self) -> type:
        """Of shared experts."""
        return _Column

    def row_parallel_linear(self) -> type:
        """Of shared experts."""
        return _Row

    def grouped_mlp_modules(self, *asked: bool) -> Any:
        """Return the experts that a model has with Transformer Engine; a pair in 0.16, a partial since."""
        experts = library.experts
        if isinstance(super().grouped_mlp_modules(*asked), tuple):
            return experts.TEGroupedMLP, library.MLPSubmodules(linear_fc1=_GroupedColumn, linear_fc2=_GroupedRow)
        parts = experts.GroupedMLPSubmodules(linear_fc1=_GroupedColumn, linear_fc2=_GroupedRow)
        return partial(experts.TEGroupedMLP, submodules=parts)


def settle(module: nn.Module, enabled: bool) -> None:
    """Let all layers of a module defer their weight gradients, or compute them in the backward."""
    for layer in module.modules():
        if isinstance(layer, Delays):
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
