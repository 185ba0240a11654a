"""An exchange of the tokens in chunks: the next chunk is dispatched while the experts run on one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Departed
from moe_conformance.contract import Claims, ExpertFn, Routing


class ChunkedExchange:
    """Chunks of T tokens that are as equal as they can be, as many on every rank, some of them without tokens."""

    def __init__(self, exchange: AllToAllExchange, chunks: int) -> None:
        """Take the exchange of one chunk, and their number."""
        self.exchange, self.chunks = exchange, chunks

    @property
    def local_experts(self) -> tuple[int, ...]:
        """Global ids of this rank's experts."""
        return self.exchange.local_experts

    @property
    def resolved(self) -> Mapping[str, str]:
        """What exchanges a chunk, and how many there are."""
        return {**self.exchange.resolved, "chunks": str(self.chunks)}

    @property
    def claims(self) -> Claims:
        """Those of the exchange of one chunk."""
        return self.exchange.claims

    def __call__(self, x: Tensor, routing: Routing, expert: ExpertFn) -> Tensor:
        """Return y of all chunks; each is waited for when its turn comes.

        Implements: OVLP-13.
        """
        chunks = self._cut(x.reshape(-1, x.shape[-1]), routing)
        ys: list[Tensor] = []
        under_way = self.exchange.depart(*chunks[0])
        for following in (*chunks[1:], None):
            arriving = under_way
            if following is not None:
                under_way = self.exchange.depart(*following)
            ys.append(self._answered(arriving, expert))
        return torch.cat(ys).reshape(x.shape)

    def _answered(self, departed: Departed, expert: ExpertFn) -> Tensor:
        delivery, handle = self.exchange.arrive(departed)
        return self.exchange.combine(expert(delivery), handle)

    def _cut(self, x_TD: Tensor, routing: Routing) -> list[tuple[Tensor, Routing]]:
        parts = (tensor.tensor_split(self.chunks) for tensor in (x_TD, routing.ids_TK, routing.weights_TK))
        return [(x, Routing(ids, weights, routing.experts)) for x, ids, weights in zip(*parts, strict=True)]
