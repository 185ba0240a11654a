"""Tokens held by all ranks of a tp group: each rank dispatches its share of them, and the outputs are gathered.

The share of rank i begins at token i T / tp, rounded down, so that T may be any number. Every rank has the whole
upstream gradient, of which the backward takes the rank's share; the gradients of tokens and weights are gathered
again and are complete on every rank. So every pair is delivered once, and its gradients are counted once.

T tokens of the tp group, S tokens in this rank's share, K slots, D hidden, W ranks of tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange import collectives, misuse
from moe_conformance.backends.native.exchange.token_padding import Withdrawing
from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.contract import Claims, Config, Delivery, Routing, Topology


class RoutingDiffers(ValueError):
    """The ranks of a tp group have different routings for the tokens that all of them hold."""


@dataclass(frozen=True)
class Shares:
    """Which of T tokens every rank of a tp group dispatches."""

    tokens: int  # T
    group: dist.ProcessGroup

    @property
    def sizes_W(self) -> list[int]:
        """S of every rank."""
        W = self.group.size()
        starts = [rank * self.tokens // W for rank in range(W + 1)]
        return [end - start for start, end in pairwise(starts)]

    def local_rows(self, rows: Tensor) -> Tensor:
        """Return a clone of this rank's share of the rows."""
        local_rows: Tensor = torch.split(rows, self.sizes_W)[self.group.rank()].clone()
        return local_rows

    def whole(self, rows: Tensor) -> Tensor:
        """Gather the rows of all ranks."""
        return collectives.all_gather(rows, self.sizes_W, self.group)


class _Cut(torch.autograd.Function):
    """This rank's share of tokens and weights; their gradients are gathered from all shares, together."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
        ctx.shares = shares
        return shares.local_rows(x_TD), shares.local_rows(weights_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        wanted = zip(gradients, ctx.needs_input_grad[:2], strict=True)
        x_TD, weights_TK = [ctx.shares.whole(part) if needed else None for part, needed in wanted]
        return x_TD, weights_TK, None


class _Join(torch.autograd.Function):
    """The outputs of all tokens, gathered from the ranks; the upstream gradient is complete on every rank already."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, shares: Shares) -> Tensor:
        ctx.shares = shares
        whole: Tensor = ctx.shares.whole(y_SD)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.shares.local_rows(gradients[0]), None


@dataclass(frozen=True)
class Shared:
    """What combine needs of one microbatch."""

    handle: Any  # of the exchange inside
    shares: Shares
    shape: tuple[int, ...]  # of x


class TokenCopies:
    """An exchange that dispatches every token of a tp group once, and returns the outputs on all its ranks."""

    def __init__(self, inner: Withdrawing, topology: Topology, config: Config) -> None:
        """Wrap an exchange.

        Raises:
            CannotBuild: neither the tp group nor the exchange group contains the other, so that a rank of another tp
                group could wait for one that was refused here; or experts are padded to the capacity of T tokens,
                which is not that of a share.
        """
        if config.capacity.padded and config.capacity.factor is not None:
            raise CannotBuild(
                "capacity.padded with token_copies: the capacity of all tokens is not that of a tp rank's share"
            )
        tp, exchange = set(topology.ranks("tp")), set(topology.ranks("ep_etp"))
        if not (tp <= exchange or exchange <= tp):
            raise CannotBuild(
                f"token_copies: neither the tp group, ranks {sorted(tp)}, nor the exchange group, ranks "
                f"{sorted(exchange)}, contains the other"
            )
        self.inner, self.group, self.config = inner, topology.group("tp"), config

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's N experts."""
        return self.inner.local_experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """The exchange inside, and over how many tp ranks tokens are divided."""
        return {**self.inner.resolved, "shared among": str(self.group.size())}

    @property
    def claims(self) -> Claims:
        """Those of the exchange inside, and that gradients are complete on each tp rank."""
        return replace(self.inner.claims, copies="complete")

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Shared]:
        """Dispatch this rank's share; x is (*lead, D) with prod(lead) == T, and the routing is that of all T.

        Raises:
            RoutingDiffers: on every rank of the tp group.
            ValueError: tokens or routing are wrong; on all other ranks of the tp group it is `DispatchRefused`.

        Implements: EXCH-35.
        """
        problem = misuse.of_input(x, routing, self.config)
        self._compare(routing.ids_TK, x.device, problem)
        x_TD = x.reshape(-1, x.shape[-1])
        shares = Shares(len(x_TD), self.group)
        x_SD, weights_SK = self._cut(x_TD, routing.weights_TK, shares)
        share = Routing(shares.local_rows(routing.ids_TK), weights_SK, routing.experts)
        delivery, handle = self.inner.dispatch(x_SD, share)
        return delivery, Shared(handle, shares, tuple(x.shape))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Return y in the shape of x, the same on every rank of tp.

        Implements: EXCH-36.
        """
        return self._join(self.inner.combine(rows, handle.handle), handle.shares).reshape(handle.shape)

    def _cut(self, x_TD: Tensor, weights_TK: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
        cut: tuple[Tensor, Tensor] = _Cut.apply(x_TD, weights_TK, shares)  # type: ignore[no-untyped-call]
        return cut

    def _join(self, y_SD: Tensor, shares: Shares) -> Tensor:
        joined: Tensor = _Join.apply(y_SD, shares)  # type: ignore[no-untyped-call]
        return joined

    def _compare(self, ids_TK: Tensor, device: torch.device, problem: str) -> None:
        """Raise on every rank of the tp group if the routings of two differ, or one has a problem with its input.

        Implements: EXCH-37.
        """
        if problem:
            local = torch.full((3,), collectives.REFUSED, device=device)  # as no T
        else:
            local = torch.cat([torch.tensor(ids_TK.shape, device=device), self._checksum(ids_TK)[None]])
        gathered_WX = collectives.all_gather(local[None], [1] * self.group.size(), self.group)
        if bool((gathered_WX[:, 0] == collectives.REFUSED).any()):
            self.inner.withdraw(device)
            if problem:
                raise ValueError(problem)
            collectives.check_not_refused(gathered_WX[:, 0])
        odd = (gathered_WX != gathered_WX[0]).any(1).nonzero().flatten().tolist()
        if odd:
            self.inner.withdraw(device)
            raise RoutingDiffers(f"ranks {odd} of the tp group have another routing than rank 0 for the same tokens")

    def _checksum(self, ids_TK: Tensor) -> Tensor:
        """Return a number in which every id counts by its place, modulo 2^64."""
        ids_P = (ids_TK.flatten() + 2) * -7046029254386353131
        places_P = 2 * torch.arange(len(ids_P), device=ids_P.device) + 1
        return ((ids_P ^ (ids_P >> 29)) * places_P * -4658895280553007687).sum()
