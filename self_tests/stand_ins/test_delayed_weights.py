"""The stand-in of Transformer Engine's delayed weight gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_conformance.stand_ins.delayed_weights import Delays, GroupedLinear


class Linear(Delays):
    """A layer that may delay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        self.begin_delays(self.weight)


def gradient(x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight."""
    return upstream.t() @ x


class TestDelays:
    def test_at_once_it_is_a_linear_layer(self) -> None:
        """Output and both gradients are there after the backward, and a hook has run."""
        layer, x, upstream = Linear(), torch.randn(4, 2, requires_grad=True), torch.randn(4, 3)
        hooks: list[str] = []
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append("ran"))
        y = layer.product(x)
        y.backward(upstream)
        assert torch.equal(x.detach() @ layer.weight.detach().t(), y.detach())
        assert torch.equal(upstream @ layer.weight.detach(), x.grad)
        assert torch.equal(gradient(x.detach(), upstream), layer.weight.grad)
        assert ["ran"] == hooks

    def test_delayed_they_come_in_the_order_of_the_backwards(self) -> None:
        """The first call computes the first microbatch; hooks run behind it, and take the gradient away."""
        layer, found = Linear(), []
        layer.wgrad_store.enabled = True

        def take() -> None:
            found.append(layer.weight.grad)
            layer.weight.grad = None

        layer.register_wgrad_accumulation_and_reduce_hooks(take)
        batches = [(torch.randn(m + 1, 2), torch.randn(m + 1, 3)) for m in range(2)]
        for x, upstream in batches:
            layer.product(x.requires_grad_()).backward(upstream)
        assert (2, []) == (len(layer.wgrad_store), found)
        layer.backward_dw()
        layer.backward_dw()
        expected = [gradient(x.detach(), upstream) for x, upstream in batches]
        assert all(map(torch.equal, expected, found))

    def test_grouped_layers_delay_all_their_weights_together(self) -> None:
        """Delayed or not, each weight has the gradient of its part of the rows; an empty part gives zeros."""
        layer, rows = GroupedLinear(3, 2, 5, torch.float32), [2, 0, 3]
        x, upstream = torch.randn(5, 2), torch.randn(5, 5)
        expected = [gradient(*parts) for parts in zip(x.split(rows), upstream.split(rows), strict=True)]
        for delays in (False, True):
            layer.zero_grad()
            layer.wgrad_store.enabled = delays
            y, bias = layer(x.clone().requires_grad_(), rows)
            y.backward(upstream)
            if delays:
                assert [None] * 3 == [weight.grad for weight in layer.parameters()]
                layer.backward_dw()
            found = [weight.grad for weight in layer.parameters()]
            assert (None, True) == (bias, all(map(torch.equal, expected, found)))

    def test_one_too_many_raises(self) -> None:
        """There is nothing to compute."""
        layer = Linear()
        layer.wgrad_store.enabled = True
        with pytest.raises(RuntimeError, match="Pop empty queue"):
            layer.backward_dw()
