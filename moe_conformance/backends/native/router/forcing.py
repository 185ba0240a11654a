"""The router whose choice a strategy forces, for benchmarks.

T tokens, E experts, K slots, D hidden, N experts of a rank. A strategy that forces logits replaces them before anything
is made of them, so that score, groups, choice and weights are the router's own; one that forces ids replaces the choice
alone.

Random numbers come from generators of the router's own. That of the noise is seeded by rank, or by the first of the
ranks that hold the same tokens, so that other tokens have other numbers; that of the biases is not, so that all
ranks draw the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.router import hot_routes
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Topology

State = tuple[Tensor, Tensor, Tensor | None, int]
_RANKS = 1 << 20  # more than there are: keeps the seeds of ranks and of routers apart


class ForcedRouter(Router):
    """A router with forced routing: random or biased logits, round robin, or a hot spot.

    The hot spot is on the first rank, node or expert; with "alternating" it goes round.

    Implements: DET-03, FORCE-02, FORCE-18, FORCE-19.
    """

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        """Build the router; `number` distinguishes it from others of its session, the same on all ranks.

        Raises:
            CannotBuild: two strategies, one that there is not, or one without the parameter that it needs.
        """
        super().__init__(config, device)
        self.strategy, self.parameter = _one_strategy(config)
        self.ranks = len(topology.ranks("ep"))
        self.held = config.experts // self.ranks
        self._check_strategy()
        self.forwards = 0
        # Which source of tokens of the exchange group this rank is; ranks that hold the same tokens count as one.
        self.source = topology.ranks("dp_cp" if config.token_copies else "ep_etp").index(topology.rank)
        holder = topology.ranks("tp")[0] if config.token_copies else topology.rank
        self.noise = torch.Generator(device).manual_seed(number * _RANKS + 1 + holder)
        self.biases = torch.Generator(device).manual_seed(number * _RANKS)
        self.kept_E: Tensor | None = None

    def state(self) -> State:
        """Return all that differs between two forwards."""
        return self.noise.get_state(), self.biases.get_state(), self.kept_E, self.forwards

    def put(self, state: State) -> None:
        """Begin the next forward from a state."""
        noise, biases, self.kept_E, self.forwards = state
        self.noise.set_state(noise)
        self.biases.set_state(biases)

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the router says of itself, and the strategy in force.

        Implements: FORCE-23.
        """
        parameter = f" by {self.parameter:g}" if self.strategy in _WITH_PARAMETER else ""
        return {**super().resolved, "forced": f"{self.strategy}{parameter}"}

    def _logits(self, x_TD: Tensor) -> Tensor:
        own_TE = super()._logits(x_TD)
        return self._replace(own_TE, self._draw(own_TE)) if self.strategy in _FORCING_LOGITS else own_TE

    def _replace(self, own_TE: Tensor, forced_TE: Tensor) -> Tensor:
        """Put the forced logits in the place of the router's own, which get their gradient.

        Implements: FORCE-07.
        """
        replaced_TE: Tensor = _StraightThrough.apply(own_TE, forced_TE)  # type: ignore[no-untyped-call]
        return replaced_TE

    def _draw(self, own_TE: Tensor) -> Tensor:
        """Return normal numbers, with a bias of each expert where one is asked for.

        Implements: FORCE-06.
        """
        noise_TE = torch.empty_like(own_TE).normal_(generator=self.noise)
        return noise_TE if self.strategy == "random" else noise_TE + self._bias(own_TE)

    def _bias(self, like_TE: Tensor) -> Tensor:
        """Return the bias (E,) of this forward; with a deviation below zero it is that of the first.

        Implements: FORCE-08, FORCE-10, FORCE-11, FORCE-12, FORCE-22.
        """
        if self.kept_E is not None:
            return self.kept_E
        drawn_E = like_TE.new_empty(self.config.experts).normal_(generator=self.biases) * abs(self.parameter)
        if self.parameter < 0:
            self.kept_E = drawn_E
        return drawn_E

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.strategy in _FORCING_LOGITS:
            return super()._select(scores_TE)
        forward, self.forwards = self.forwards, self.forwards + 1
        if self.strategy == "round_robin":
            return self._deal(len(scores_TE), scores_TE.device)
        return self._heat(len(scores_TE), forward, scores_TE.device)

    def _heat(self, tokens: int, forward: int, device: torch.device) -> Tensor:
        """Assign as many slots as possible, or by the ratio, to the hot experts.

        Implements: FORCE-09, FORCE-13, FORCE-14, FORCE-15, FORCE-21.
        """
        K, E, N = self.config.top_k, self.config.experts, self.held
        first = forward % self.ranks * N if self.strategy == "alternating" else 0
        size = {"one_expert": 1, "one_node": int(self.parameter) * N}.get(self.strategy, N)
        hot, others = hot_routes.block(first, size, E)
        slots_T = hot_routes.as_many_as_possible(tokens, K, hot, device)
        if self.strategy == "ratio":
            slots_T = hot_routes.by_ratio(tokens, K, self.parameter, self.ranks, N, device)
            others = hot_routes.rank_by_rank(others, N)
        return hot_routes.dealt(hot, others, slots_T, K)

    def _check_strategy(self) -> None:
        """Refuse what the parameter and the sizes leave no route for.

        Raises:
            CannotBuild: nodes that do not divide the ranks, a ratio below 1, or too many slots for one.
        """
        K, E = self.config.top_k, self.config.experts
        if self.strategy == "one_node" and (self.parameter < 1 or self.ranks % self.parameter):
            raise CannotBuild(f"one_node: {self.ranks} expert parallel ranks are no nodes of {self.parameter:g}")
        if self.strategy == "ratio" and self.parameter < 1:
            raise CannotBuild(f"ratio: the hot rank cannot get {self.parameter:g} times the load of each other rank")
        if self.strategy == "ratio" and self.ranks > 1 and E - self.held < K:
            raise CannotBuild(f"ratio: {K} slots of a token, of {E} experts in all, leave the hot rank no choice")

    def _deal(self, tokens: int, device: torch.device) -> Tensor:
        """Assign experts round robin, beginning where a source of as many tokens before this one would end.

        Implements: FORCE-03, FORCE-04.
        """
        K = self.config.top_k
        first = self.source * tokens * K
        ids = torch.arange(first, first + tokens * K, device=device) % self.config.experts
        return ids.reshape(tokens, K)

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the usual weights; a token without a forced expert of finite score has weights 0, not 0 / 0.

        Implements: FORCE-05.
        """
        lost_T1 = (scores_TE.gather(1, ids_TK) == -torch.inf).all(1, keepdim=True)
        return super()._weights(scores_TE.masked_fill(lost_T1, 0.0), ids_TK).masked_fill(lost_T1, 0.0)


class _StraightThrough(torch.autograd.Function):
    """The second argument forward, the gradient to the first backward."""

    @staticmethod
    def forward(ctx: Any, own_TE: Tensor, forced_TE: Tensor) -> Tensor:
        return forced_TE.clone()

    @staticmethod
    def backward(ctx: Any, *dforced_TE: Tensor) -> tuple[Tensor, None]:
        return dforced_TE[0], None


_FORCING_LOGITS = ("random", "biased")
_WITH_PARAMETER = ("biased", "one_node", "ratio")


def _one_strategy(config: Config) -> tuple[str, float]:
    """Return the strategy and its parameter, 0.0 where it has none.

    Implements: FORCE-17.
    """
    if len(set(config.routing.forced)) > 1:
        named = " and ".join(f"{name} ({parameter})" for name, parameter in config.routing.forced)
        raise CannotBuild(f"one strategy can force the routes, not {named}")
    name, parameter = config.routing.forced[0]
    if name in _WITH_PARAMETER and parameter is None:
        raise CannotBuild(f"the strategy {name} needs a parameter; there is none")
    return name, parameter or 0.0
