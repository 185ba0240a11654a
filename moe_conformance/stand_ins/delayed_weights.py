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
        self._pending: deque[tuple[tuple[Tensor, ...], Callable[..., Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, tensors: tuple[Tensor, ...], product: Callable[..., Tensor]) -> None:
        """Keep a product for later."""
        self._pending.append((tensors, product))

    def pop(self) -> Tensor:
        """Compute the oldest product.

        Raises:
            RuntimeError: there is none.
        """
        if not self._pending:
            raise RuntimeError("Pop empty queue.")
        tensors, product = self._pending.popleft()
        return product(*tensors)


class _Linear(torch.autograd.Function):
    """x W^T, of which the gradient of W may be left to the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OD: Tensor, store: WeightGradStore) -> Tensor:
        ctx.save_for_backward(x, weight_OD)
        ctx.store = store
        return x @ weight_OD.t()

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x, weight_OD), (upstream,) = ctx.saved_tensors, upstreams
        dx = upstream @ weight_OD
        if ctx.store.enabled:
            ctx.store.put((x, upstream), _weight_gradient)
            return dx, None, None
        return dx, _weight_gradient(x, upstream), None


def _weight_gradient(x: Tensor, upstream: Tensor) -> Tensor:
    return upstream.reshape(-1, upstream.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class Delays(nn.Module):
    """What a linear layer with a `weight` has in Transformer Engine, to be mixed into a layer of the library."""

    weight: nn.Parameter

    def begin_delays(self) -> None:
        """Make the store, and mark the weight so that its gradient hook is left to this module."""
        self.wgrad_store = WeightGradStore()
        self.wgrad_hooks: list[Callable[[], None]] = []
        self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
        self.weight.register_post_accumulate_grad_hook(self._computed_at_once)

    def _computed_at_once(self, weight: Tensor) -> None:
        if not self.wgrad_store.enabled:  # it is also called where the backward has no gradient
            self._run_hooks()

    def product(self, x: Tensor) -> Tensor:
        """Return x W^T."""
        result: Tensor = _Linear.apply(x, self.weight, self.wgrad_store)  # type: ignore[no-untyped-call]
        return result

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Run the hook when a gradient of the weight is there."""
        self.wgrad_hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the oldest gradient that was delayed, and run the hooks; nothing where none is ever delayed."""
        if not self.wgrad_store.enabled:
            return
        gradient_OD = self.wgrad_store.pop()
        if self.weight.grad is None:  # as there: what is in `grad` stays, and a caller is to have moved it away
            self.weight.grad = gradient_OD.to(self.weight.dtype)
        self._run_hooks()

    def _run_hooks(self) -> None:
        for hook in self.wgrad_hooks:
            hook()
