"""Transformer Engine's delayed weight gradients: the store of a linear layer, `backward_dw`, and its hooks.

The interface is that of `transformer_engine.pytorch` 2.x: `WeightGradStore`, `skip_backward_post_hook` on weights, and
of modules `backward_dw` and `register_wgrad_accumulation_and_reduce_hooks`. I rows, D inputs, O outputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class WeightGradStore:
    """The products of a layer that are still to be computed, first in, first out."""

    def __init__(self) -> None:
        """Begin empty and not enabled: all is computed in the backward."""
        self.enabled = False
        self._pending: deque[tuple[tuple[Tensor, ...], Callable[..., tuple[Tensor, ...]]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, tensors: tuple[Tensor, ...], products: Callable[..., tuple[Tensor, ...]]) -> None:
        """Keep products for later."""
        self._pending.append((tensors, products))

    def pop(self) -> tuple[Tensor, ...]:
        """Compute the oldest products.

        Raises:
            RuntimeError: there is none.
        """
        if not self._pending:
            raise RuntimeError("Pop empty queue.")
        tensors, products = self._pending.popleft()
        return products(*tensors)


class _Grouped(torch.autograd.Function):
    """x_i W_i^T for consecutive parts of the rows, of which the gradients of the W_i may be left to the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], store: WeightGradStore, *weights_OD: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights_OD)
        ctx.rows, ctx.store = rows, store
        return torch.cat([part @ weight.t() for part, weight in zip(x.split(rows), weights_OD, strict=True)])

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:
        (x, *weights_OD), (upstream,) = ctx.saved_tensors, upstreams
        parts = upstream.split(ctx.rows)
        dx = torch.cat([part @ weight for part, weight in zip(parts, weights_OD, strict=True)])
        given = (*x.split(ctx.rows), *parts)
        if ctx.store.enabled:
            ctx.store.put(given, _weight_gradients)
            return dx, None, None, *[None for _ in weights_OD]
        return dx, None, None, *_weight_gradients(*given)


def _weight_gradients(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of each weight, given the parts of x and then those of the upstream gradient."""
    half = len(parts) // 2
    return tuple(upstream.t() @ x for x, upstream in zip(parts[:half], parts[half:], strict=True))


class Delays(nn.Module):
    """What a linear layer has in Transformer Engine, to be mixed into a layer of the library, or alone."""

    def begin_delays(self, *weights: nn.Parameter) -> None:
        """Make the store, and mark the weights so that their gradient hooks are left to this module."""
        self.wgrad_store = WeightGradStore()
        self.wgrad_hooks: list[Callable[[], None]] = []
        self._delayed = weights
        for weight in weights:
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
            weight.register_post_accumulate_grad_hook(self._computed_at_once)

    def _computed_at_once(self, weight: Tensor) -> None:
        if not self.wgrad_store.enabled:  # it is also called where the backward has no gradient
            self._run_hooks()

    def product(self, x: Tensor, rows: list[int] | None = None) -> Tensor:
        """Return x W^T, with the weights of consecutive parts of the rows."""
        x_ID = x.reshape(-1, x.shape[-1])
        result: Tensor = _Grouped.apply(x_ID, rows or [len(x_ID)], self.wgrad_store, *self._delayed)  # type: ignore[no-untyped-call]
        return result.reshape(*x.shape[:-1], result.shape[-1])

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Run the hook when a gradient is there."""
        self.wgrad_hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the oldest gradients that were delayed, and run the hooks; nothing where none are ever delayed."""
        if not self.wgrad_store.enabled:
            return
        for weight, gradient_OD in zip(self._delayed, self.wgrad_store.pop(), strict=True):
            if weight.grad is None:  # as there: what is in `grad` stays, and a caller is to have moved it away
                weight.grad = gradient_OD.to(weight.dtype)
        self._run_hooks()

    def _run_hooks(self) -> None:
        for hook in self.wgrad_hooks:
            hook()


class GroupedLinear(Delays):
    """`transformer_engine.pytorch.GroupedLinear` without biases: a weight for each part of the rows."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        """Make the weights, `weight0` and so on, with zeros."""
        super().__init__()
        weights = [nn.Parameter(torch.zeros(out_features, in_features, dtype=dtype)) for _ in range(num_gemms)]
        for i, weight in enumerate(weights):
            self.register_parameter(f"weight{i}", weight)
        self.begin_delays(*weights)

    def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        """Return the products, and no bias."""
        return self.product(x, m_splits), None
