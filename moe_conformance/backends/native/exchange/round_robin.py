"""The all-to-all exchange of a round robin: slot k of token t goes to expert (o + t K + k) mod E, o on its source rank.

Where a rank has as many experts as a token has slots, and o is a multiple of their number N, every token goes to all
experts of one rank: the rows for a rank are every ep-th token, N times over, and nothing has to be sorted or looked up.
The ids are compared with those of the round robin that begins where they do, since a router may select others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Routing

SLICES = "slices of a round robin"  # the name of the shortcut


class RoundRobinExchange(AllToAllExchange):
    """Takes the shortcut where it holds, and the way of all ids elsewhere."""

    @property
    def resolved(self) -> Mapping[str, str]:
        """As of every exchange, and what rows are made by."""
        return {**super().resolved, "round robin": "by slices where K = N divides the start", "optional": SLICES}

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        """Return one row per pair, by expert.

        Implements: FAST-14.
        """
        if room is not None or not self._holds(routing):
            return super()._permute(x, routing, room)
        start, shape = int(routing.ids_TK[0, 0]), tuple(x.shape)
        T, K = routing.ids_TK.shape
        pairs = self._pairs(start, T, K, x.device)
        weights_P = self._weights(routing, pairs)
        rows_PD = self._rows(x.reshape(-1, x.shape[-1]), start)
        if self.weighs_input:
            rows_PD = self._weigh(rows_PD, weights_P)
        return rows_PD, Permuted(pairs, weights_P, shape)

    def _holds(self, routing: Routing) -> bool:
        """Whether every token goes to all experts of one rank."""
        (T, K), N, ep = routing.ids_TK.shape, self.placement.held, self.topology.sizes["ep"]
        whole = bool(T) and K == N and (ep == 1 or int(routing.ids_TK[0, 0]) % N == 0)
        return whole and self._dealt(routing)

    def _dealt(self, routing: Routing) -> bool:
        """Whether the ids are those of a round robin.

        Implements: FORCE-20.
        """
        ids_P = routing.ids_TK.flatten()
        steps_P = torch.arange(len(ids_P), device=ids_P.device)
        return torch.equal(ids_P, (ids_P[0] + steps_P) % routing.experts)

    def _first(self, owner: int, start: int) -> int:
        """Return the first token of this rank that goes to a rank of ep."""
        return (owner - start // self.placement.held) % self.topology.sizes["ep"]

    def _rows(self, x_TD: Tensor, start: int) -> Tensor:
        """Return the tokens of every rank of ep in turn, once for each of its experts."""
        N, ep = self.placement.held, self.topology.sizes["ep"]
        return torch.cat([x_TD[self._first(owner, start) :: ep].repeat(N, 1) for owner in range(ep)])

    def _pairs(self, start: int, T: int, K: int, device: torch.device) -> Pairs:
        """Return token and slot of every row; expert n of a rank is slot n - o, modulo N, of each of its tokens."""
        N, ep = self.placement.held, self.topology.sizes["ep"]
        tokens = [torch.arange(self._first(owner, start), max(T, ep), ep, device=device) for owner in range(ep)]
        tokens = [of_owner[of_owner < T] for of_owner in tokens]
        slots_N = (torch.arange(N, device=device) - start) % N
        return Pairs(
            torch.cat([of_owner.repeat(N) for of_owner in tokens]),
            torch.cat([slots_N.repeat_interleave(len(of_owner)) for of_owner in tokens]),
            torch.tensor([len(of_owner) for of_owner in tokens for _ in range(N)], device=device),
            (T, K),
        )
