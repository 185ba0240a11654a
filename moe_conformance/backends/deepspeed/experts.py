"""SwiGLU experts as a user of the library writes them, in the library's `Experts`. F intermediate size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from moe_conformance.backends.deepspeed import library
from moe_conformance.contract import Config, Delivery, Named, Read


class Expert(nn.Module):
    """down(silu(gate x) * up x): the library copies it for every expert of the rank."""

    def __init__(self, config: Config) -> None:
        """Build the three projections."""
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the expert's output, (..., D)."""
        out: Tensor = self.down(nn.functional.silu(self.gate(rows)) * self.up(rows))
        return out


def windows(layer: Any, held: range, read: Read) -> Iterator[Named]:
    """Yield the three matrices of every expert of this rank."""
    for expert, module in zip(held, layer.deepspeed_moe.experts.deepspeed_experts, strict=True):
        yield Named("gate", expert, read(module.gate.weight))
        yield Named("up", expert, read(module.up.weight))
        yield Named("down", expert, read(module.down.weight))


class Experts:
    """The experts of a MoE layer in an engine, which reduces their gradients."""

    def __init__(self, engine: Any, held: range) -> None:
        """Take the engine of a layer."""
        self.engine, self._held = engine, held
        self.module: nn.Module = engine.module.deepspeed_moe.experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class of the experts, the type of their parameters and in which gradients are reduced."""
        return {
            "experts": type(self.module).__qualname__,
            "parameters": str(next(self.module.parameters()).dtype),
            "reduced in": str(self.engine.communication_data_type),
            "shims": library.SHIMS,
        }

    def __call__(self, delivery: Delivery) -> Tensor:
        """Return the output in the form of the exchange, (N, R, D), as from one source rank.

        Raises:
            ValueError: the rows have another form, of which the library knows none.
        """
        if len(delivery.shape) != 3:
            raise ValueError("the library's experts have as many rows each: they take no rows sorted by expert")
        out: Tensor = self.module(delivery.rows_RD.reshape(1, *delivery.shape))
        return out.reshape(delivery.shape)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the three matrices of every expert."""
        return windows(self.engine.module, self._held, read)


def engine_of(model: nn.Module, unit: Any) -> Any:
    """Return the library's engine of a model, without an optimizer; collective."""
    engine, *_ = library.initialize(
        model=model,
        config={"train_micro_batch_size_per_gpu": 1},
        mpu=unit,
        dist_init_required=False,
    )
    return engine
