"""The library's blocks, made of modules as models have them, with given or built experts.

T tokens, K slots, E experts, N experts of this rank, R rows, D hidden, F intermediate size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from moe_conformance.backends.colossalai.gates import Averaged, deepseek_gate, shims
from moe_conformance.backends.colossalai.placement import Native, Placement
from moe_conformance.contract import Config, Delivery, ExpertFn, Named, Read, Routing


class MLP(nn.Module):
    """An expert as DeepSeek's and Mixtral's models have it: SwiGLU, under the names of both."""

    def __init__(self, hidden: int, ffn: int) -> None:
        """Build the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)
        self.act_fn = nn.SiLU()

    @property
    def w1(self) -> nn.Linear:
        """The gate projection of Mixtral's experts."""
        return self.gate_proj

    @property
    def w2(self) -> nn.Linear:
        """The down projection."""
        return self.down_proj

    @property
    def w3(self) -> nn.Linear:
        """The up projection."""
        return self.up_proj

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output of some rows."""
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class _Given(nn.Module):
    """An expert in the place of a model's: calls the expert of the suite with rows of one of this rank's experts."""

    def __init__(self, number: int, held: int) -> None:
        super().__init__()
        self._number, self._held = number, held
        self.expert: ExpertFn | None = None

    def forward(self, rows_RD: Tensor) -> Tensor:
        counts_N = [0] * self._held
        counts_N[self._number] = len(rows_RD)
        assert self.expert is not None
        return self.expert(Delivery.grouped(rows_RD, counts_N))


class _GivenGate(nn.Module):
    """A gate in the place of a model's: returns a routing."""

    routing: Routing

    def __init__(self, losses: int) -> None:
        super().__init__()
        self._losses = losses

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        none = (x.new_zeros(1),) * self._losses
        return self.routing.ids_TK, self.routing.weights_TK, *none


class _Unscaled:
    """Takes the place of the functions around an expert that scale gradients for the average over ranks."""

    @staticmethod
    def apply(rows: Tensor, *_: Any) -> Tensor:
        return rows


_SCALERS = ("EPGradScalerIn", "EPGradScalerOut", "DPGradScalerIn", "DPGradScalerOut")


class Exchange:
    """A block of DeepSeek, whose gate returns the given routing and whose experts call the given expert.

    What scales the gradients of experts is left out, and judged with the layer.
    """

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build the block."""
        held = placement.held(config)
        self.local_experts = tuple(held)
        self._gate = _GivenGate(losses=1 if config.variant == "deepseek" else 0)
        self._given = [_Given(number, len(held)) for number in range(len(held))]
        experts = [nn.Module() for _ in range(config.experts)]
        experts[held.start : held.stop] = self._given
        native = Native(self._gate, experts, config.top_k, None)
        self._block = placement.block(config.variant, native)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class, and over how many ranks it sends."""
        of_block = {"block": type(self._block).__qualname__, "ep ranks": str(self._block.ep_size)}
        return of_block | {"left out": "gradient scalers around experts"}

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Run the block; where this rank's experts have no rows, the expert is called with none, added to nothing."""
        called: list[bool] = []

        def noted(delivery: Delivery) -> Tensor:
            called.append(True)
            return expert(delivery)

        self._gate.routing = routing
        for given in self._given:
            given.expert = noted
        x_1TD = x.reshape(1, -1, x.shape[-1])
        scalers: dict[str, Any] = dict.fromkeys(_SCALERS, _Unscaled)
        with patch.multiple(sys.modules[type(self._block).__module__], **scalers):
            y: Tensor = self._block(x_1TD)
        if not called:
            y = y + expert(Delivery.grouped(x_1TD[0, :0], [0] * len(self._given))).sum(0)
        return y.reshape(x.shape)


class Layer:
    """A block of Mixtral, or of DeepSeek with the library's gate; several shared experts are one of their width."""

    def __init__(self, config: Config, placement: Placement) -> None:
        """Build the block."""
        self._held = placement.held(config)
        experts: list[nn.Module] = [MLP(config.hidden, config.ffn) for _ in range(config.experts)]
        self._mixtral, self._config = config.variant == "mixtral", config
        shared = MLP(config.hidden, sum(config.shared.ffn)) if config.shared.ffn else None
        if self._mixtral:
            gate: Any = nn.Linear(config.hidden, config.experts, bias=False)
        else:
            gate = deepseek_gate(config, placement)
            gate.register_forward_hook(_no_loss)
        native = Native(gate, experts, config.top_k, shared).to(config.dtype)
        self.module = placement.block(config.variant, native)
        self.finish = Averaged(self.module, placement.topology)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes of the parts."""
        return {
            "block": type(self.module).__qualname__,
            "gate": type(self.module.gate).__qualname__,
            "ep ranks": str(self.module.ep_size),
            "repaired": "none" if self._mixtral else "CO-02",
            "shims": shims(),
        }

    def train(self, mode: bool = True) -> None:
        """Switch the block."""
        self.module.train(mode)

    def __call__(self, x: Tensor) -> Tensor:
        """Return y; the block takes sequences of a batch."""
        made = self.module(x.reshape(1, -1, x.shape[-1]))
        y: Tensor = made[0] if self._mixtral else made
        return y.reshape(x.shape)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the gate, this rank's experts and the shared ones."""
        yield Named("router", None, read(self.module.gate.weight))
        for expert in self._held:
            for name, view in _matrices(self.module.experts[expert], read):
                yield Named(name, expert, view)
        if self._config.shared.ffn:
            of_shared = dict(_matrices(self.module.shared_experts, read))
            first = 0
            for number, width in enumerate(self._config.shared.ffn):
                rows = slice(first, first + width)
                yield Named("shared_gate", number, of_shared["gate"][rows])
                yield Named("shared_up", number, of_shared["up"][rows])
                yield Named("shared_down", number, of_shared["down"][:, rows])
                first += width


def _matrices(mlp: Any, read: Read) -> Iterator[tuple[str, Tensor]]:
    for name in ("gate", "up", "down"):
        yield name, read(getattr(mlp, f"{name}_proj").weight)


def _no_loss(_gate: nn.Module, _inputs: Any, made: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the block a loss of zero where the gate has none: it does not take None (CO-02)."""
    ids_TK, weights_TK, loss = made
    return ids_TK, weights_TK, weights_TK.new_zeros(1) if loss is None else loss
