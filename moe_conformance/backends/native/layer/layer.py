"""A whole layer: the router, an exchange, the experts and the shared experts.

With `shared.overlap` the shared experts run while the tokens are on their way to the routed ones, forward, and while
the tokens' gradients are on their way back, backward. On CUDA a collective runs on a stream of its own, so that this
takes no further one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_conformance.backends.native.exchange.chunks import ChunkedExchange
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.exchange.token_padding import ClaimingExchange
from moe_conformance.backends.native.fused.low_latency import LowLatencyExchange
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.layer.shared_experts import OutputBias, Score, SharedExperts
from moe_conformance.backends.native.offered import OF_ROUTERS, offers
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Claims, Config, Delivery, Named, Read, Routing, Topology, Unsupported

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession


class Layer(nn.Module):
    """Router, exchange, experts and shared experts; the routed and the shared part are added last."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        device: torch.device,
        routed: tuple[Router, ClaimingExchange, Experts],
        shared_class: type[SharedExperts],
    ) -> None:
        """Put the routed parts together, and make the shared ones that are asked for.

        Raises:
            CannotBuild: a gate, an overlap or a bias of no shared expert; an overlap with another exchange than
                all-to-all.
        """
        super().__init__()
        self.config = config
        self.router, self.exchange, self.experts = routed
        if not config.shared.ffn and (config.shared.gate or config.shared.overlap or config.shared.bias):
            settings = "shared.gate, shared.overlap and shared.bias"
            raise CannotBuild(f"{settings} need shared experts: shared.ffn is empty")
        in_places = isinstance(self.exchange, LowLatencyExchange)  # it does not depart and arrive in two steps
        if config.shared.overlap and (in_places or not isinstance(self.exchange, AllToAllExchange)):
            raise CannotBuild(f"shared.overlap needs the variant alltoall, not {config.variant!r}")
        self.shared = shared_class(config, topology, device) if config.shared.ffn else None
        self.bias = OutputBias(config, device) if config.shared.bias else None
        self.score = Score(config, device) if config.shared.gate else None

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the parts report, and the shared experts."""
        shared = "none" if self.shared is None else f"{type(self.shared).__name__} {self.config.shared.ffn}"
        when = "during dispatch" if self.config.shared.overlap else "after combine"
        parts = (self.router, self.exchange, self.experts)
        return {key: value for part in parts for key, value in part.resolved.items()} | {
            "layer": type(self).__name__,
            "shared experts": shared,
            "shared experts run": when,
        }

    @property
    def claims(self) -> Claims:
        """Those of the router and of the exchange."""
        return self.router.claims.joined(self.exchange.claims)

    @property
    def parts(self) -> tuple[Replicated, ...]:
        """What has parameters."""
        parts = (self.router, self.experts, self.shared, self.bias, self.score)
        return tuple(part for part in parts if part is not None)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows of all parts."""
        shared = () if self.shared is None else self.shared.named(read)
        bias = () if self.bias is None else self.bias.named(read)
        score = () if self.score is None else (Named("shared_score", None, read(self.score.score_1D)),)
        return chain(self.router.named(read), self.experts.named(read), shared, bias, score)

    def forward(self, x: Tensor) -> Tensor:
        """Return y in the shape and dtype of x.

        Implements: GRAD-18, SHARE-02, SHARE-07.
        """
        routing = self.router(x).routing
        if self.config.shared.overlap:
            assert isinstance(self.exchange, AllToAllExchange)
            departed = self.exchange.depart(x, routing)
            shared = self._shared_part(x)
            delivery, handle = self.exchange.arrive(departed)
            return self._added(self._routed(delivery, handle), shared)
        return self.finished(self._routed(*self._dispatched(x, routing)), x)

    def finished(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the routed output with the shared part of x."""
        return self._added(y, self._shared_part(x))

    def _dispatched(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        return self.exchange.dispatch(x, routing)

    def _routed(self, delivery: Delivery, handle: Any) -> Tensor:
        return self.exchange.combine(self.experts(delivery), handle)

    def _shared_part(self, x: Tensor) -> Tensor | None:
        """Return what the shared experts add, gated where there is a gate; None without shared experts."""
        if self.shared is None:
            return None
        x_TD = x.reshape(-1, x.shape[-1])
        shared_TD: Tensor = self._biased(self.shared(x_TD))
        if self.score is not None:
            shared_TD = (self.score(x_TD) * shared_TD).to(x.dtype)
        return shared_TD.reshape(x.shape)

    def _biased(self, shared_TD: Tensor) -> Tensor:
        return shared_TD if self.bias is None else self.bias(shared_TD)

    def _added(self, y: Tensor, shared: Tensor | None) -> Tensor:
        """Add the shared part; never in place, as either may be a tensor that somebody else holds.

        Implements: EXCH-08, SHARE-01, SHARE-04.
        """
        return y if shared is None else y + shared


@offers("layer", maps=(*OF_ROUTERS, "shared"))
def layer(session: NativeSession, config: Config) -> Layer:
    """Build a layer of the session's own router, exchange and experts, and its shared experts."""
    if config.shared.overlap and config.padding.splits == "equal":
        raise Unsupported("native has no shared.overlap with padding.splits='equal'")
    routed = replace(config, shared=Config.shared)  # without shared experts
    plain = replace(routed, router_dtype=None, jitter=0.0)
    router, exchange, experts = session.router(routed), session.exchange(plain), session.experts(plain)
    assert isinstance(experts, Experts)  # all others are refused above
    assert not isinstance(exchange, ChunkedExchange)
    parts = router, exchange, experts
    return session.use(Layer)(config, session.topology, session.device, parts, session.use(SharedExperts))
