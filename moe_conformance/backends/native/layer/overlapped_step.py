"""A training step in which the forward of a microbatch and the backward of the one before it take turns.

Each of them stops where its tokens are exchanged, and the other goes on: 1F1B on one stage, as in Megatron-Core's
combined 1F1B. The order of all collectives follows from the number of layers and microbatches alone, so that it is the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.deferred import WeightGradients
from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.layer.overlapped_pass import LayerPass, Pass
from moe_conformance.backends.native.offered import offers
from moe_conformance.contract import Claims, Config

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession


class OverlappedStep:
    """The layers of a model and the schedule of their step.

    Implements: OVLP-11, OVLP-15.
    """

    def __init__(
        self, config: Config, layers: Sequence[Layer], passes: type[LayerPass], queues: type[WeightGradients]
    ) -> None:
        """Take the layers, and what makes a pass through one of them."""
        self.config, self.layers, self._passes = config, tuple(layers), passes
        self.queues = [queues() for _ in self.layers]

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the first layer reports, and what overlaps."""
        deferred = "deferred" if self.config.overlap.deferred_weights else "at once"
        return {
            **self.layers[0].resolved,
            "overlapped step": type(self).__name__,
            "overlap": self.claims.overlap,
            "weight gradients": deferred,
        }

    @property
    def claims(self) -> Claims:
        """Those of the layers; with ep = 1 no tokens are sent to experts on other ranks, and nothing overlaps."""
        exchange, claims = self.layers[0].exchange, self.layers[0].claims
        assert isinstance(exchange, AllToAllExchange)  # others are refused where the step is built
        return claims if exchange.topology.sizes["ep"] > 1 else replace(claims, overlap="no")

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run all microbatches and return their outputs.

        Implements: OVLP-09.
        """
        ys: list[Tensor] = []
        backward: Pass | None = None
        with self._putting_off():
            for x_TD, upstream_TD in zip(xs, upstreams, strict=True):
                passes = self._passes_of_all()
                ys.append(self._in_turn(self._forward(x_TD, passes), backward))
                backward = self._backward(x_TD, upstream_TD, passes)
            if backward is not None:
                self._in_turn(backward)
        return ys

    def _passes_of_all(self) -> list[LayerPass]:
        again = self.config.overlap.recompute_experts
        return [self._passes(layer, queue, again=again) for layer, queue in zip(self.layers, self.queues, strict=True)]

    def _forward(self, x_TD: Tensor, passes: Sequence[LayerPass]) -> Pass:
        for layer_pass in passes:
            x_TD = yield from layer_pass.forward(x_TD)
        return x_TD

    def _backward(self, x_TD: Tensor, gradient_TD: Tensor, passes: Sequence[LayerPass]) -> Pass:
        for layer_pass in reversed(passes):
            gradient_TD = yield from layer_pass.backward(gradient_TD)
        x_TD.grad = gradient_TD if x_TD.grad is None else x_TD.grad + gradient_TD
        return gradient_TD

    def _in_turn(self, first: Pass, second: Pass | None = None) -> Tensor:
        """Go on with each of the two in turn, from one stop to the next, and return the result of the first."""
        results: dict[Pass, Tensor] = {}
        going = [first] if second is None else [first, second]
        while going:
            for going_pass in tuple(going):
                try:
                    next(going_pass)
                except StopIteration as end:
                    results[going_pass] = end.value
                    going.remove(going_pass)
        return results[first]

    @contextmanager
    def _putting_off(self) -> Iterator[None]:
        """Have weight gradients of experts put off, where that is asked for; what is called elsewhere computes them."""
        holders = tuple(zip(self.layers, self.queues, strict=True))
        deferred = self.config.overlap.deferred_weights
        for layer, queue in holders if deferred else ():
            _put_off(layer, queue)
        try:
            yield
        finally:
            for layer, _ in holders:
                _put_off(layer, None)


def _put_off(layer: Layer, queue: WeightGradients | None) -> None:
    layer.experts.deferred = queue
    if layer.shared is not None:
        layer.shared.deferred = queue


@offers("overlapped_step", maps=None)
def overlapped_step(session: NativeSession, config: Config) -> OverlappedStep:
    """Build layers whose exchanges overlap with other microbatches."""
    plain = replace(config, overlap=Config.overlap)
    if config.variant != "alltoall" or config.shared.overlap or config.overlap.chunks > 1:
        raise CannotBuild("a step overlaps the variant 'alltoall', without shared.overlap and overlap.chunks")
    if config.padding.tokens != "no" or config.padding.splits == "equal" or config.routing.forced:
        raise CannotBuild("a step overlaps no padded exchange, and no forced routing")
    layers = [session.surface("layer", plain) for _ in range(config.overlap.layers)]
    return session.use(OverlappedStep)(config, layers, session.use(LayerPass), session.use(WeightGradients))
