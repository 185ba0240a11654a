"""FORCE: bugs of routers that are forced to a hot rank, node or expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.backends.native.router import hot_routes
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.contract import Config, Topology
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import Expectation, planted

EP4 = Layout(4, ep=4)


@planted(
    Expectation("FORCE-09", "hot-rank", "route", "each source rank has another hot rank: 0, 1"),
    Expectation("FORCE-15", "hot-rank-alternating", "route", "the hot expert parallel rank on the ranks [0, 1]"),
)
class OwnRankIsHot(ForcedRouter):
    """Every source rank sends its tokens to its own experts: nothing is exchanged, and nobody is overloaded."""

    def _heat(self, tokens: int, forward: int, device: torch.device) -> Tensor:
        ids_TK = super()._heat(tokens, forward, device)
        return (ids_TK + self.source * self.held) % self.config.experts


@planted(
    Expectation("FORCE-09", "hot-rank-few-experts", "route", "one rank gets 2 of the 3 slots of every token"),
    layout=EP4,
)
class FirstSlotsAlone(ForcedRouter):
    """A token's first slot goes to the hot rank, the others anywhere."""

    def _heat(self, tokens: int, forward: int, device: torch.device) -> Tensor:
        ids_TK = super()._heat(tokens, forward, device)
        E = self.config.experts
        return (ids_TK[:, :1] + torch.arange(self.config.top_k, device=device) * self.held) % E


@planted(Expectation("FORCE-13", "hot-expert", "route", "one expert gets 1 of the 3 slots", "dealt unevenly"))
class OthersInOrder(ForcedRouter):
    """Beside the hot expert every token has the same others: the next ones."""

    def _heat(self, tokens: int, forward: int, device: torch.device) -> Tensor:
        ids_TK = super()._heat(tokens, forward, device)
        return ids_TK if self.strategy != "one_expert" else ids_TK[:1].expand(tokens, -1)


@planted(
    Expectation("FORCE-14", "hot-node", "route", "one node of 2 ranks gets 3 of the 3 slots", "spread evenly"),
    layout=EP4,
)
class FirstRankOfTheNode(ForcedRouter):
    """The first rank of the node gets all it can, and the second what is left over."""

    def _heat(self, tokens: int, forward: int, device: torch.device) -> Tensor:
        if self.strategy != "one_node":
            return super()._heat(tokens, forward, device)
        return torch.arange(self.config.top_k, device=device).expand(tokens, -1)


@planted(Expectation("FORCE-15", "hot-rank-alternating", "route", "likely cause: the hot rank stays"))
class HotRankStays(ForcedRouter):
    """The number of forwards is of this call, and not of the router."""

    def _heat(self, tokens: int, forward: int, device: torch.device) -> Tensor:
        return super()._heat(tokens, 0, device)


@planted(
    Expectation("FORCE-15", "hot-rank-alternating", "route", "expected for alternating: one rank on with every forward")
)
class IdleForwardsDoNotCount(ForcedRouter):
    """A forward without tokens returns early, and the rank stays behind the others."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        ids_TK = super()._select(scores_TE)
        if not len(scores_TE):
            self.forwards -= 1
        return ids_TK


@planted(Expectation("FORCE-21", "hot-rank-by-ratio", "route", "one rank gets 2.5 times what each other rank gets"))
class RatioOnTop(ForcedRouter):
    """The hot rank gets so many times the load of another rank more than that rank, in place of so many times."""

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        super().__init__(config, device, topology, number)
        if self.strategy == "ratio":
            self.parameter += 1


@planted(
    Expectation("FORCE-21", "hot-rank-by-ratio", "route", "one rank gets 2.5 times what each other rank gets"),
    layout=EP4,
)
class OthersNotInTurn(ForcedRouter):
    """The others are dealt by slot, hot slots included: of the other ranks some get more than others."""

    def _heat(self, tokens: int, forward: int, device: torch.device) -> Tensor:
        ids_TK = super()._heat(tokens, forward, device)
        if self.strategy != "ratio":
            return ids_TK
        K, N = self.config.top_k, self.held
        hot_TK = ids_TK < N
        others = torch.tensor(hot_routes.rank_by_rank(range(N, self.config.experts), N), device=device)
        rest_T = (~hot_TK).sum(1).cumsum(0) - (~hot_TK).sum(1)
        place_TK = (rest_T[:, None] + torch.arange(K, device=device)) % len(others)
        return torch.where(hot_TK, ids_TK, others[place_TK])


@planted(Expectation("FORCE-17", "forced-by-two", "run", "a router forced by random (None) and round_robin (None)"))
class FirstStrategyWins(ForcedRouter):
    """Of two strategies the first one is in force."""

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        first = config.changed({"routing.forced": config.routing.forced[:1]})
        super().__init__(first, device, topology, number)


@planted(Expectation("FORCE-17", "forced-without-parameter", "run", "a router forced by biased (None)"))
class NoParameterIsOne(ForcedRouter):
    """A strategy without its parameter has 1 for it."""

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        given = tuple((name, 1.0 if value is None else value) for name, value in config.routing.forced)
        super().__init__(config.changed({"routing.forced": given}), device, topology, number)


@planted(Expectation("FORCE-19", "hot-rank-drops", "route", "rank 0 has the capacity at least 31 instead of 16"))
class ForcedTokensAllStay(ForcedRouter):
    """Forced routes are returned before tokens are dropped."""

    def _drop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        return ids_TK, weights_TK


@planted(Expectation("FORCE-13", "hot-expert", "route", "expert"))
class HotExpertOfEachRank(ForcedRouter):
    """Every source rank has a hot expert of its own."""

    def _heat(self, tokens: int, forward: int, device: torch.device) -> Tensor:
        ids_TK = super()._heat(tokens, forward, device)
        return (ids_TK + self.source) % self.config.experts if self.strategy == "one_expert" else ids_TK


@planted(Expectation("FORCE-14", "hot-node", "route", "one node of 2 ranks gets"), layout=EP4)
class NodeForFirstSlots(ForcedRouter):
    """A token's first slot goes to the hot node, the others to the ranks behind it."""

    def _heat(self, tokens: int, forward: int, device: torch.device) -> Tensor:
        ids_TK = super()._heat(tokens, forward, device)
        steps_K = torch.arange(self.config.top_k, device=device) * self.held
        return (ids_TK[:, :1] + steps_K) % self.config.experts if self.strategy == "one_node" else ids_TK
