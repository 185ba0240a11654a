"""Padding the ranks' token counts to one size, around any exchange, and cutting the padding off again.

Rows that are added are zeros without a slot: none of them is sent, but where all tokens are, and no gradient comes
back. What belongs to one microbatch is in its handle.

T tokens of this rank, P rows that it dispatches, K slots, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange import collectives
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.offered import offers
from moe_conformance.contract import Claiming, Claims, Config, Delivery, Routing, SplitExchange, Topology, Unsupported

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession


class BoundBroken(ValueError):
    """This rank has more tokens than the configured bound."""


class TokenPadding:
    """To how many rows the tokens of this rank are padded: as many as those of every rank of ep_etp.

    Implements: PACK-02.
    """

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        """Take what is asked for; "no" counts as "group_max", for an exchange that cannot do without.

        Raises:
            CannotBuild: a bound is missing, or given where none is used.
        """
        self.group, self.device = topology.group("ep_etp"), device
        self.alignment, self.bound = config.padding.alignment, config.padding.bound
        if (config.padding.tokens == "bound") is (self.bound is None):
            raise CannotBuild(f"padding.bound = {self.bound} with padding.tokens = {config.padding.tokens!r}")

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built."""
        return {"token padding": type(self).__name__}

    @property
    def claims(self) -> Claims:
        """Where the number comes from, and what it is a multiple of."""
        return Claims(padding="group_max" if self.bound is None else "bound", alignment=self.alignment)

    def count(self, tokens: int) -> int:
        """Return P; it takes all ranks of the group to know the largest T, and nobody to know the bound.

        Raises:
            BoundBroken: T is larger than the bound.

        Implements: PACK-01, PACK-11, PACK-12.
        """
        most = self._largest(tokens) if self.bound is None else self._within(tokens, self.bound)
        return self._aligned(most)

    def _largest(self, tokens: int) -> int:
        return collectives.largest(tokens, self.group, self.device)

    def _within(self, tokens: int, bound: int) -> int:
        if tokens > bound:
            raise BoundBroken(f"{tokens} tokens on this rank; padding.bound = {bound} is the maximum")
        return bound

    def _aligned(self, rows: int) -> int:
        return -(-rows // self.alignment) * self.alignment


class ClaimingExchange(SplitExchange, Claiming, Protocol):
    """What all exchanges of native are: two halves and what they claim."""


class Withdrawing(ClaimingExchange, Protocol):
    """An exchange of which a rank can stay away without leaving the others waiting."""

    def withdraw(self, device: torch.device) -> None:
        """Make the dispatch of all other ranks of the group raise."""


@dataclass(frozen=True)
class Untrimmed:
    """What it takes to cut one microbatch's padding off.

    Implements: PACK-06.
    """

    handle: Any  # of the exchange inside
    tokens: int  # T
    shape: tuple[int, ...]  # of x


class PaddedExchange:
    """An exchange that dispatches P tokens on every rank and returns those that are the rank's own.

    Implements: PACK-05.
    """

    def __init__(self, inner: Withdrawing, padding: TokenPadding) -> None:
        """Put the padding around an exchange."""
        self.inner, self.padding = inner, padding

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's N experts."""
        return self.inner.local_experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The exchange inside, and how it is padded."""
        return {**self.inner.resolved, **self.padding.resolved}

    @property
    def claims(self) -> Claims:
        """Those of the exchange inside, and the padding."""
        return self.inner.claims.joined(self.padding.claims)

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Untrimmed]:
        """Dispatch the tokens and the rows that are added; x is (*lead, D) with prod(lead) == T.

        Raises:
            BoundBroken: this rank has more tokens than the bound; the others raise `DispatchRefused`.

        Implements: PACK-03.
        """
        x_TD = x.reshape(-1, x.shape[-1])
        T = len(x_TD)
        try:
            padded = self._pad(x_TD, routing, self.padding.count(T) - T)
        except Exception:
            self.inner.withdraw(x.device)
            raise
        delivery, handle = self.inner.dispatch(*padded)
        return delivery, Untrimmed(handle, T, tuple(x.shape))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return y in the shape of x.

        Implements: PACK-04.
        """
        return self._trim(self.inner.combine(rows, handle.handle), handle).reshape(handle.shape)

    def withdraw(self, device: torch.device) -> None:
        """Take part in the collectives of a dispatch that this rank refuses."""
        self.padding.count(0)
        self.inner.withdraw(device)

    def _pad(self, x_TD: Tensor, routing: Routing, missing: int) -> tuple[Tensor, Routing]:
        below = (0, 0, 0, missing)
        ids_PK = F.pad(routing.ids_TK, below, value=-1)
        return F.pad(x_TD, below), Routing(ids_PK, F.pad(routing.weights_TK, below), routing.experts)

    def _trim(self, y_PD: Tensor, handle: Untrimmed) -> Tensor:
        return y_PD[: handle.tokens]


@offers("token_padding")
def token_padding(session: NativeSession, config: Config) -> TokenPadding:
    """Build the padding of the exchange of `config`."""
    if not session.pads(config):
        raise Unsupported(f"the exchange {config.variant!r} pads token counts only with padding.tokens")
    session.unpadded_exchange(config)  # where there is none, there is nothing to pad
    return session.use(TokenPadding)(config, session.topology, session.device)
