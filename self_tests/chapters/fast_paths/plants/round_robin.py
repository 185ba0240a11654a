"""Exchanges of a round robin that take the shortcut where it does not hold, or from another start."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_conformance.backends.native.exchange.round_robin import RoundRobinExchange
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Routing
from self_tests.planted_bugs.plant import EP2_ETP2, SINGLE, TP2_EP2, Expectation, planted

_PR = "saforem2/torchtitan pull request 11, as its review suspected"


class _OfAnySlots(RoundRobinExchange):
    """Slices, also where a token has other than N slots."""

    def _pairs(self, start: int, T: int, K: int, device: torch.device) -> Pairs:
        pairs = super()._pairs(start, T, K, device)
        return replace(pairs, slot_P=pairs.slot_P % K)


@planted(
    Expectation(
        "FAST-14", "dealt-fewer-slots-even", "dispatch", "token 6 slot 0 was delivered to expert 2 on rank 0 instead of"
    ),
    real=_PR,
)
class SlicesWhateverTheSlots(_OfAnySlots):
    """The shortcut is taken for all tokens, also of fewer slots than a rank has experts."""

    def _holds(self, routing: Routing) -> bool:
        return bool(len(routing.ids_TK))


@planted(
    Expectation(
        "FAST-14", "dealt-fewer-slots-even", "dispatch", "token 6 slot 0 was delivered to expert 2 on rank 0 instead of"
    ),
    real="saforem2/torchtitan at 8d22a86d: the sizes of splits decide whether the direct route is taken",
)
class SlicesWhereLoadsDiffer(_OfAnySlots):
    """The shortcut is taken where ranks get unequally many rows, of which the most are a multiple of N."""

    def _holds(self, routing: Routing) -> bool:
        N, ep = self.placement.held, self.topology.sizes["ep"]
        load_W = torch.bincount(routing.ids_TK.flatten() // N, minlength=ep)
        return bool(load_W.min() != load_W.max()) and int(load_W.max()) % N == 0


@planted(Expectation("FAST-14", "dealt-shifted-even", "dispatch", "are exchanged: the first was delivered"), real=_PR)
class SlicesWhateverTheStart(RoundRobinExchange):
    """The shortcut is taken where a token's slots begin in the middle of a rank's experts."""

    def _holds(self, routing: Routing) -> bool:
        return bool(len(routing.ids_TK)) and routing.ids_TK.shape[1] == self.placement.held


@planted(
    Expectation("FAST-14", "dealt-whole-rank-without-tokens", "dispatch", "are exchanged: the first was delivered"),
    real=_PR,
    layout=TP2_EP2,
)
class SlicesFromTheFirstRank(RoundRobinExchange):
    """Every rank sends its first token to the first rank of ep, wherever its ids begin."""

    def _first(self, owner: int, start: int) -> int:
        return super()._first(owner, 0)


@planted(
    Expectation("FAST-14", "dealt-whole-even", "dispatch", "token 6 slot 0 was not delivered to expert 0"),
    layout=EP2_ETP2,
)
class SlicesOfEqualLength(RoundRobinExchange):
    """Tokens that ep does not divide are cut off: every rank gets as many."""

    def _pairs(self, start: int, T: int, K: int, device: torch.device) -> Pairs:
        ep = self.topology.sizes["ep"]
        pairs = super()._pairs(start, T // ep * ep, K, device)
        return replace(pairs, shape=(T, K))

    def _rows(self, x_TD: torch.Tensor, start: int) -> torch.Tensor:
        ep = self.topology.sizes["ep"]
        return super()._rows(x_TD[: len(x_TD) // ep * ep], start)


@planted(Expectation("FAST-14", "dealt-shifted-even", "combine", "weight"), layout=SINGLE)
class SlotsInTheOrderOfExperts(RoundRobinExchange):
    """On one rank slot k of a token is taken for that of expert k, wherever the ids begin."""

    def _pairs(self, start: int, T: int, K: int, device: torch.device) -> Pairs:
        return super()._pairs(0, T, K, device)


@planted(Expectation("FAST-14", "dealt-input-weights-even", "dispatch", "likely cause: the weight was not applied"))
class InputWeightsLeftOut(RoundRobinExchange):
    """The shortcut forgets the weights where they are applied at the input of the experts."""

    def _weigh(self, rows_PD: torch.Tensor, weights_P: torch.Tensor) -> torch.Tensor:
        return rows_PD if self.weighs_input else super()._weigh(rows_PD, weights_P)
