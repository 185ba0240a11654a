"""Native's token exchange as a surface: differentiable, with handles that a caller keeps and biases in combine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from moe_conformance.backends.native.fused import autograd
from moe_conformance.backends.native.fused.fp8_wire import Float8Wire
from moe_conformance.backends.native.fused.token_exchange import Handle, TokenExchange
from moe_conformance.backends.native.groups import Placement
from moe_conformance.backends.native.offered import offers
from moe_conformance.contract import Claims, Config, Received, Topology

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession


class ReusableExchange:
    """Dispatch and combine over `ep_etp`; see `contract.TokenExchange`."""

    def __init__(
        self, config: Config, topology: Topology, exchange_class: type[TokenExchange], float8_class: type[Float8Wire]
    ) -> None:
        """Build the exchange of this rank's group.

        Raises:
            CannotBuild: the experts do not divide over ep.
        """
        self.hidden = config.hidden
        self.placement = Placement.of(config.experts, topology)
        wire = float8_class() if config.wire == "float8" else None
        self.exchange = exchange_class(topology.group("ep_etp"), config.experts, self.placement.shards, wire)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's N experts."""
        return self.placement.ids

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built."""
        return {"token_exchange": type(self.exchange).__name__}

    @property
    def claims(self) -> Claims:
        """That a token is sent once to a rank, and in which format."""
        wire, tokens = self.exchange.wire, Claims(wire="tokens")
        return tokens if wire is None else tokens.joined(wire.claims)

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor | None = None,
        weights_TK: Tensor | None = None,
        handle: Handle | None = None,
    ) -> Received:
        """Send tokens; rows come by source rank, then token.

        Raises:
            ValueError: as `TokenExchange.dispatch`; tokens of another width than was configured.
        """
        if x_TD.shape[-1] != self.hidden:
            if handle is None:
                self.exchange.withdraw(x_TD.device)  # else the others wait for rows
            raise ValueError(f"tokens of width {x_TD.shape[-1]} instead of {self.hidden}")
        arrived = autograd.dispatch(self.exchange, x_TD, ids_TK, weights_TK, handle)
        known = arrived.handle
        weights_RK, scales_RB = arrived.weights_RK, arrived.scales_RB
        return Received(arrived.rows_RD, known.ids_RK, weights_RK, known.counts_N, known, scales_RB)

    def combine(self, rows_RD: Tensor, handle: Handle, biases: tuple[Tensor, ...] = ()) -> Tensor:
        """Add up the rows of every token in the order of ranks, then the biases in theirs.

        Raises:
            ValueError: rows or biases of another number than the handle's.

        Implements: EXCH-28, EXCH-31.
        """
        for bias_TD in biases:
            if bias_TD.shape != (handle.tokens, rows_RD.shape[1]):
                raise ValueError(f"a bias of shape {tuple(bias_TD.shape)} for {handle.tokens} tokens")
        y_TD = autograd.combine(self.exchange, rows_RD, handle)
        for bias_TD in biases:
            y_TD = self._add(y_TD, bias_TD)
        return y_TD

    def _add(self, y_TD: Tensor, bias_TD: Tensor) -> Tensor:
        return y_TD + bias_TD


@offers("token_exchange", maps=("wire",))
def token_exchange(session: NativeSession, config: Config) -> ReusableExchange:
    """Build the token exchange that the managers work over."""
    return session.use(ReusableExchange)(config, session.topology, session.use(TokenExchange), session.use(Float8Wire))
