"""The flex exchange: one dispatcher over a fused token exchange, with a manager for the form that the experts get.

It spans the ranks of ep and etp together: a token goes once to each rank that holds one of its experts or a shard of
it, and the sum over the ranks is at once that over experts and over shards. Weights are sent with the rows, in float32
at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange import misuse
from moe_conformance.backends.native.fused.fp8_wire import Float8Wire
from moe_conformance.backends.native.fused.managers import Manager
from moe_conformance.backends.native.fused.token_exchange import TokenExchange
from moe_conformance.backends.native.groups import CannotBuild, Placement
from moe_conformance.contract import Claims, Config, Delivery, Routing, Topology


class Flight:
    """One microbatch between dispatch and combine: what its manager keeps is let go of with the first combine.

    Implements: EXCH-10.
    """

    def __init__(self, held: Any, delivered: int, shape: tuple[int, ...]) -> None:
        """Keep the manager's part, the number of rows that went to the experts, and the shape of x."""
        self._held, self._delivered, self.shape = held, delivered, shape

    @property
    def released(self) -> bool:
        """Whether it has been combined."""
        return self._held is None

    def land(self) -> Any:
        """Return the manager's part, once.

        Raises:
            ValueError: it was combined before.
        """
        if self._held is None:
            raise ValueError("this handle was combined before: every dispatch gives a handle for one combine")
        held, self._held = self._held, None
        return held

    def misfit(self, rows: Tensor) -> str:
        """Return what is wrong with expert outputs, "" if nothing is."""
        return misuse.of_expert_outputs(rows, self._delivered, self.shape)

    def stand_in(self, rows: Tensor) -> tuple[Tensor, Any]:
        """Return rows of NaN of the right shape, and the manager's part, which stays here."""
        return misuse.stand_in(rows, self._delivered, self.shape), self._held


class FlexExchange:
    """Dispatch, the given experts, combine, over `ep_etp`; see `contract.SplitExchange`."""

    def __init__(
        self,
        config: Config,
        topology: Topology,
        manager_class: type[Manager],
        token_exchange_class: type[TokenExchange] = TokenExchange,
        float8_class: type[Float8Wire] = Float8Wire,
    ) -> None:
        """Build the token exchange of this rank's group and the manager over it.

        Raises:
            CannotBuild: the experts do not divide over ep, or the manager cannot do what is asked for.
        """
        if config.capacity.padded:
            raise CannotBuild(
                "capacity.padded: a token is sent to a rank once, so that the rows of an expert cannot be padded"
            )
        self.config = config
        self.placement = Placement.of(config.experts, topology)
        sizes = {"factor": config.receive_buffer.factor, "rows": config.receive_buffer.rows}
        given = " and ".join(f"receive_buffer.{name} = {size}" for name, size in sizes.items() if size is not None)
        if config.receive_buffer.overflow == "drop" and not given:
            raise CannotBuild("receive_buffer.overflow = 'drop' needs receive_buffer.factor or receive_buffer.rows")
        if given and not manager_class.has_budget:
            raise CannotBuild(f"{manager_class.__name__} has no buffer of fixed size: {given}")
        if config.receive_buffer.factor is not None and config.receive_buffer.rows is not None:
            raise CannotBuild(f"a buffer has one size: {given}")
        group = topology.group("ep_etp")
        wire = float8_class() if config.wire == "float8" else None
        self.manager = manager_class(config, token_exchange_class(group, config.experts, self.placement.shards, wire))

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's N experts."""
        return self.placement.ids

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes that were built, and where the weights are applied."""
        return {
            "exchange": type(self).__name__,
            "manager": type(self.manager).__name__,
            "token_exchange": type(self.manager.exchange).__name__,
            "weights": "input" if self.manager.weighs_input else "expert",
        }

    @property
    def claims(self) -> Claims:
        """That a token is sent once to a rank and in which format, what the experts receive and who applies weights."""
        wire = self.manager.exchange.wire
        claims = Claims(wire="tokens", handed=self.manager.handed, weights_at="expert")
        return claims if wire is None else claims.joined(wire.claims)

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Flight]:
        """Return what this rank's experts receive, and the handle; x is (*lead, D) with prod(lead) == T.

        Raises:
            ValueError: tokens or routing are wrong, here or on another rank of the group.
        """
        if problem := misuse.of_input(x, routing, self.config):
            self._refuse(x)
            raise ValueError(problem)
        weights_TK = routing.weights_TK.to(torch.promote_types(x.dtype, torch.float32))
        delivery, held = self.manager.dispatch(x.reshape(-1, x.shape[-1]), routing.ids_TK, weights_TK)
        return delivery, Flight(held, len(delivery.rows_RD), tuple(x.shape))

    def withdraw(self, device: torch.device) -> None:
        """Take part in the collectives of a dispatch that this rank refuses: the others raise `DispatchRefused`."""
        self.manager.exchange.withdraw(device)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return y in the shape of x; the handle is of no use afterwards.

        Raises:
            ValueError: the rows do not fit the handle, or it was combined before.

        Implements: EXCH-45.
        """
        if handle.released or not (problem := handle.misfit(rows)):
            return self.manager.combine(rows, handle.land()).reshape(handle.shape)
        self.manager.combine(*handle.stand_in(rows))
        raise ValueError(problem)

    def _refuse(self, x: Tensor) -> None:
        """Dispatch a token that the token exchange refuses, by which the other ranks learn of it."""
        ids_TK = torch.full((1, 1), self.config.experts, device=x.device)
        weights_TK = torch.zeros(1, 1, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        with suppress(ValueError):
            self.manager.dispatch(x.new_zeros(1, self.config.hidden), ids_TK, weights_TK)
