"""The router: scores, selection and weights of this rank's tokens.

T tokens, E experts, K slots, D hidden, G expert groups. Everything is computed in float32 at least (float64
for float64, or where `router_dtype` asks for it), whatever the dtype of x and of the router, and the weights are left
in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance.backends.native.groups import CannotBuild
from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.offered import offers
from moe_conformance.backends.native.router import capacity
from moe_conformance.contract import Claims, Config, Named, Read, Routed, Routing, Unsupported

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession

_SPREAD, _SEED = 0.02, 1234  # of the weight of a new model: standard deviation and seed


class Router(Replicated):
    """A linear map to E logits, a score of each, the K best by score plus bias, their scores as weights."""

    replicas = ("dp_cp", "tp")  # every rank of the pipeline stage has tokens of its own
    balance_bias: Tensor | None

    def __init__(self, config: Config, device: torch.device) -> None:
        """Make the parameter, NaN until someone writes it, and the bias of zeros where one is asked for.

        Raises:
            CannotBuild: K experts cannot be had from E, or from the groups.
        """
        super().__init__()
        _check(config)
        self.config = config
        self.wide = _computed_in(config)
        self.router_ED = nn.Parameter(
            torch.full((config.experts, config.hidden), torch.nan, dtype=config.dtype, device=device)
        )
        self.gate_bias_E = self._gate_bias(device) if config.gate_bias else None
        bias_E = torch.zeros(config.experts, dtype=self.wide, device=device) if config.routing.balance_bias else None
        self.register_buffer("balance_bias", bias_E)

    @torch.no_grad()
    def initialise(self) -> None:
        """Give the parameters the values of a new model: the same on all ranks, wherever their generators stand.

        Implements: ROUTE-23.
        """
        self.router_ED.copy_(torch.randn(self.router_ED.shape, generator=self._generator()) * _SPREAD)
        if self.gate_bias_E is not None:
            self.gate_bias_E.zero_()

    def _generator(self) -> torch.Generator:
        """Return what initial values are drawn from."""
        return torch.Generator().manual_seed(_SEED)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built, and its score."""
        return {"router": type(self).__name__, "score": self.config.routing.score}

    @property
    def claims(self) -> Claims:
        """The dtype it computes in, and the noise of training where there is jitter."""
        return Claims(dtype=self.wide, noise="training" if self.config.jitter else "no")

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the router (E, D), and the biases of logits and of the balance (E,) where there are any."""
        yield Named("router", None, read(self.router_ED))
        if self.gate_bias_E is not None:
            yield Named("gate_bias", None, read(self.gate_bias_E))
        if self.balance_bias is not None:
            yield Named("balance_bias", None, read(self.balance_bias))

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None, recorded_TK: Tensor | None = None) -> Routed:
        """Return ids, weights, logits and counts; x is (*lead, D). Where the mask is True all slots are empty.

        Recorded ids take the place of a selection.

        Implements: FORCE-02, ROUTE-09.
        """
        logits_TE = self._logits(self._jittered(x.reshape(-1, x.shape[-1])))
        scores_TE = self._scores(logits_TE)
        ids_TK = self._select(scores_TE) if recorded_TK is None else recorded_TK
        weights_TK = self._weights(scores_TE, ids_TK)
        if padding_mask_T is not None:
            ids_TK, weights_TK = self._leave_out(ids_TK, weights_TK, padding_mask_T.reshape(-1, 1))
        counts_E = torch.bincount(ids_TK[ids_TK >= 0], minlength=self.config.experts)  # of all selected slots
        if self.config.capacity.factor is not None:
            ids_TK, weights_TK = self._drop(ids_TK, weights_TK)
        return Routed(Routing(ids_TK, weights_TK, self.config.experts), logits_TE, counts_E)

    def _jittered(self, x_TD: Tensor) -> Tensor:
        """Return x, in training times jitter, in the dtype of x.

        Implements: ROUTE-18, ROUTE-19.
        """
        return x_TD * self._factors(x_TD) if self.config.jitter and self.training else x_TD

    def _factors(self, x_TD: Tensor) -> Tensor:
        """Draw a factor for each element."""
        return torch.empty_like(x_TD).uniform_(1 - self.config.jitter, 1 + self.config.jitter)

    def _leave_out(self, ids_TK: Tensor, weights_TK: Tensor, padding_T1: Tensor) -> tuple[Tensor, Tensor]:
        """Route padding nowhere.

        Implements: PACK-08, ROUTE-22.
        """
        return ids_TK.masked_fill(padding_T1, -1), weights_TK.masked_fill(padding_T1, 0.0)

    def _drop(self, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Empty the slots that find no room with their experts; the weights of the others stay as they are.

        Implements: DROP-07, DROP-09, DROP-11.
        """
        kept_TK = self._keep(ids_TK, weights_TK.detach(), self._capacity(len(ids_TK)))
        return torch.where(kept_TK, ids_TK, -1), torch.where(kept_TK, weights_TK, 0.0)

    def _capacity(self, tokens: int) -> int:
        return capacity.of_rank(self.config, tokens)

    def _keep(self, ids_TK: Tensor, weights_TK: Tensor, room: int) -> Tensor:
        """Say which slots stay, bool (T, K), where every expert has `room` for as many."""
        worth_TK = weights_TK if self.config.capacity.drop_policy == "weights" else None
        return capacity.keep(ids_TK, self.config.experts, room, worth_TK)

    def _gate_bias(self, device: torch.device) -> nn.Parameter:
        """Return the parameter, NaN until someone writes it."""
        return nn.Parameter(torch.full((self.config.experts,), torch.nan, dtype=self.config.dtype, device=device))

    def _logits(self, x_TD: Tensor) -> Tensor:
        """Return the logits, with the gate bias where there is one.

        Implements: ROUTE-10.
        """
        bias_E = None if self.gate_bias_E is None else self.gate_bias_E.to(self.wide)
        return F.linear(x_TD.to(self.wide), self.router_ED.to(self.wide), bias_E)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Return a score per expert. For softmax_topk it is the logit: its softmax comes after the choice.

        Implements: ROUTE-02.
        """
        if self.config.routing.score == "softmax":
            return logits_TE.softmax(1)
        if self.config.routing.score == "sigmoid":
            return logits_TE.sigmoid()
        if self.config.routing.score == "sqrtsoftplus":
            return _sqrt_softplus(logits_TE)
        return logits_TE

    def _select(self, scores_TE: Tensor) -> Tensor:
        """Return the K best experts of each token, best first, from the best groups if there are groups.

        Implements: ROUTE-01.
        """
        choice_TE = scores_TE.detach()
        if self.balance_bias is not None:
            choice_TE = choice_TE + self.balance_bias
        if self.config.routing.groups is not None:
            choice_TE = self._mask_groups(choice_TE, *self.config.routing.groups)
        return choice_TE.topk(self.config.top_k, dim=1).indices

    def _mask_groups(self, choice_TE: Tensor, groups: int, selected: int) -> Tensor:
        """Mask all but the `selected` best groups with -inf, as biased scores may be negative.

        Implements: ROUTE-04.
        """
        choice_TGe = choice_TE.reshape(-1, groups, self.config.experts // groups)
        worth_TG = choice_TGe.topk(_addends(self.config, selected), dim=2).values.sum(2)
        best_Tg = worth_TG.topk(selected, dim=1).indices
        shut_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter(1, best_Tg, False)
        return choice_TGe.masked_fill(shut_TG.unsqueeze(2), -torch.inf).flatten(1)

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Return the scores of the selected experts without the expert bias, normalised if asked, then scaled.

        Implements: ROUTE-02, ROUTE-03, ROUTE-05, ROUTE-06, ROUTE-07, ROUTE-14.
        """
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.config.routing.score == "softmax_topk":
            weights_TK = weights_TK.softmax(1)
        if self.config.routing.normalise:
            sum_T1 = weights_TK.sum(1, keepdim=True)  # 0 where all selected scores underflow
            weights_TK = weights_TK / sum_T1.masked_fill(sum_T1 == 0, 1.0)
        return weights_TK * self.config.routing.scale


def _computed_in(config: Config) -> torch.dtype:
    """Return the dtype of logits, scores and weights: float32, and no narrower than x or than what is asked for.

    Implements: ROUTE-11.
    """
    return torch.promote_types(config.dtype, config.router_dtype or torch.float32)


def _sqrt_softplus(logits_TE: Tensor) -> Tensor:
    """Return sqrt(log(1 + exp(l))).

    `F.softplus` turns linear at 20, which is visible in float64. The clamp is for the gradient: where log(1 +
    exp(l)) underflows, the slope of the square root is infinite, and infinity times zero is NaN.

    Implements: ROUTE-14.
    """
    softplus_TE = -F.logsigmoid(-logits_TE)
    return softplus_TE.clamp_min(torch.finfo(softplus_TE.dtype).tiny).sqrt()


def _addends(config: Config, selected: int) -> int:
    """Return how many of a group's best experts make up its worth."""
    return {"top2_sum": 2, "topk_sum": config.top_k // selected, "max": 1}[config.routing.group_score]


def _check(config: Config) -> None:
    """Raise `CannotBuild` where the choice would have too few experts."""
    E, K = config.experts, config.top_k
    if not 1 <= K <= E:
        raise CannotBuild(f"top_k = {K} of {E} experts")
    if config.routing.groups is None:
        return
    groups, selected = config.routing.groups
    if groups < 1 or E % groups:
        raise CannotBuild(f"{E} experts do not divide into {groups} groups")
    if not 1 <= selected <= groups:
        raise CannotBuild(f"{selected} groups selected of {groups}")
    if selected * (E // groups) < K:
        raise CannotBuild(f"top_k = {K} from {selected} groups of {E // groups} experts")
    if not 1 <= _addends(config, selected) <= E // groups:
        addends = _addends(config, selected)
        raise CannotBuild(f"{config.routing.group_score} adds up {addends} scores of a group of {E // groups} experts")


@offers("masked_router", maps=None)
def masked_router(session: NativeSession, config: Config) -> Router:
    """Build the router, which takes a mask."""
    if config.capacity.factor is not None:
        raise Unsupported("native drops by capacity where no token is padding")
    return session.router(config)


@offers("initial_router", maps=None)
def initial_router(session: NativeSession, config: Config) -> Router:
    """Build a router with the parameters of a new model."""
    router = session.router(config)
    router.initialise()
    return router
