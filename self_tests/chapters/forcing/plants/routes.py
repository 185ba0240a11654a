"""FORCE: bugs of forced groups, loads, weights and gradients."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Routed
from self_tests.planted_bugs.plant import TP2_EP2, Expectation, planted

# ---- groups --------------------------------------------------------------------------------------------------------


@planted(
    Expectation("FORCE-18", "forced-random-groups", "route", "groups; expected at most 2", "after the group limit"),
    Expectation("FORCE-18", "forced-biased-groups", "route", "groups; expected at most 2", "after the group limit"),
)
class ForcedBehindTheLimit(ForcedRouter):
    """Random logits take the place of those that the group limit has masked, so that every group is open again."""

    def _mask_groups(self, choice_TE: Tensor, groups: int, chosen: int) -> Tensor:
        return choice_TE


@planted(
    Expectation("FORCE-18", "forced-random-groups", "route", "groups that the router's own logits select"),
    Expectation("FORCE-18", "forced-kept-bias-groups", "route", "instead of"),
)
class GroupsOfItsOwn(ForcedRouter):
    """The groups are chosen before the logits are forced, and stay chosen."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        self.own_TE = own_TE.detach()
        return super()._draw(own_TE)

    def _mask_groups(self, choice_TE: Tensor, groups: int, chosen: int) -> Tensor:
        open_TE = super()._mask_groups(self._scores(self.own_TE), groups, chosen)
        return choice_TE.masked_fill(open_TE == -torch.inf, -torch.inf)


@planted(
    Expectation("FORCE-18", "forced-round-robin-groups", "route", "were limited to the groups"),
    Expectation(
        *("FORCE-18", "forced-round-robin-small-groups", "route"),
        *("rank 0 has the loads [", "per expert; expected for round_robin"),
    ),
)
class ForcedIdsFiltered(ForcedRouter):
    """Forced ids in groups that are closed to a token give way to the best of the open ones."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.strategy != "round_robin":
            return super()._select(scores_TE)
        favour_TE = torch.zeros_like(scores_TE).scatter(1, super()._select(scores_TE), 1e3)
        favour_TE = (favour_TE + scores_TE.detach()).masked_fill(~self._open(scores_TE), -torch.inf)
        return favour_TE.topk(self.config.top_k).indices

    def _open(self, scores_TE: Tensor) -> Tensor:
        assert self.config.routing.groups is not None
        return self._mask_groups(scores_TE.detach(), *self.config.routing.groups) > -torch.inf


@planted(
    Expectation(
        "FORCE-18", "forced-random-groups", "route", "forced routing random was requested, accepted and ignored"
    ),
    Expectation(
        "FORCE-18",
        "forced-round-robin-groups",
        "route",
        "forced routing round_robin was requested, accepted and ignored",
    ),
    Expectation(
        "FORCE-03",
        "forced-round-robin-groups",
        "route",
        "forced routing round_robin was requested, accepted and ignored",
    ),
    Expectation("FORCE-20", "forced-round-robin-groups", "route", "are routed by the router's own logits"),
)
class NothingForced(ForcedRouter):
    """The setting is taken, and the router goes on choosing by itself."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return Router._logits(self, x_TD)

    def _select(self, scores_TE: Tensor) -> Tensor:
        return Router._select(self, scores_TE)


# ---- loads ---------------------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "FORCE-03", "forced-round-robin-groups", "route", "expected for round_robin: they differ by at most one"
    )
)
class EveryTokenBeginsAtTheFirst(ForcedRouter):
    """Experts are dealt out to the slots of a token, and anew to those of the next."""

    def _deal(self, tokens: int, device: torch.device) -> Tensor:
        return torch.arange(self.config.top_k, device=device).repeat(tokens, 1)


@planted(
    Expectation(
        *("FORCE-04", "forced-round-robin-small-groups", "route", "the ranks [0, 1] together have the loads [3, "),
        "as even as over one; likely cause: a rank does",
    )
)
class RanksBeginAfterTokens(ForcedRouter):
    """A rank begins as many experts behind the one before as that has tokens, and not slots."""

    def _deal(self, tokens: int, device: torch.device) -> Tensor:
        begun_too_far = self.source * tokens * (self.config.top_k - 1)
        return (super()._deal(tokens, device) - begun_too_far) % self.config.experts


@planted(
    Expectation(
        "FORCE-03", "forced-round-robin-groups", "route", "run with random seed", "selected [", "in the original run"
    )
)
class DealtAtRandom(ForcedRouter):
    """Experts are dealt out to the tokens in an order that is drawn, with the same loads each time."""

    def _deal(self, tokens: int, device: torch.device) -> Tensor:
        return super()._deal(tokens, device)[torch.randperm(tokens, device=device)]


@planted(Expectation("FORCE-02", "forced-random-groups-biased", "route", "reports the load", "as its tokens selected"))
class LoadOfItsOwnChoice(ForcedRouter):
    """The load is counted of what the router would have chosen itself."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        own_TE = Router._logits(self, x.reshape(-1, x.shape[-1]))
        counts_E = torch.bincount(Router._select(self, self._scores(own_TE)).flatten(), minlength=self.config.experts)
        return replace(super().forward(x, padding_mask_T), counts_E=counts_E)


# ---- weights and gradients -----------------------------------------------------------------------------------------


@planted(Expectation("FORCE-05", "forced-round-robin-groups", "route", "experts that the router would have selected"))
class WeightsOfTheReplaced(ForcedRouter):
    """Forced experts get the weights of those whose place they take."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        if self.strategy == "round_robin":
            ids_TK = Router._select(self, scores_TE)
        return super()._weights(scores_TE, ids_TK)


@planted(
    Expectation("FORCE-05", "forced-round-robin-one-group", "route", "likely cause: the weights were not normalised")
)
class ForcedAreNotNormalised(ForcedRouter):
    """The weights of forced experts are left undivided, as they are not the best ones."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return scores_TE.gather(1, ids_TK) * self.config.routing.scale


@planted(
    Expectation("FORCE-05", "forced-round-robin-groups", "finish", "every element of the router's gradient is zero")
)
class FrozenByForce(ForcedRouter):
    """Where ids are forced the router is taken to have nothing to learn, and only tokens get a gradient."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        if self.strategy != "round_robin":
            return super()._logits(x_TD)
        return F.linear(x_TD.to(self.wide), self.router_ED.detach().to(self.wide))


@planted(
    Expectation("FORCE-07", "forced-random-groups", "gradient", "no gradient passes through the forced"),
    Expectation("FORCE-07", "forced-kept-bias-groups", "gradient", "no gradient passes through the forced"),
)
class NoGradientOfForcedLogits(ForcedRouter):
    """Nothing goes back through forced logits, and the router stands still."""

    def _replace(self, own_TE: Tensor, forced_TE: Tensor) -> Tensor:
        return forced_TE + 0 * own_TE


@planted(
    Expectation("FORCE-08", "forced-bias-alone", "route", "and others in forward", "one per expert for all tokens")
)
class StraightThroughByArithmetic(ForcedRouter):
    """Forced logits are the router's own plus the difference, so that they lose digits to large logits, or are NaN."""

    def _replace(self, own_TE: Tensor, forced_TE: Tensor) -> Tensor:
        return own_TE + (forced_TE - own_TE).detach()


@planted(
    Expectation(
        "FORCE-06", "forced-random-copies", "route", "selects the same experts for all 48 tokens in two forwards"
    ),
    layout=TP2_EP2,
)
class OwnLogitsTimesZero(ForcedRouter):
    """Forced logits have the router's own added, times zero, so that there is a graph; of infinite logits it is NaN."""

    def _replace(self, own_TE: Tensor, forced_TE: Tensor) -> Tensor:
        return super()._replace(own_TE, forced_TE) + 0 * own_TE


@planted(Expectation("FORCE-05", "forced-masked-softmax-of-chosen", "route", "has the weights [nan", "-inf"))
class SoftmaxOfNothing(ForcedRouter):
    """The weights of a token that is forced to masked experts alone are 0 / 0."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return Router._weights(self, scores_TE, ids_TK)


@planted(
    Expectation(
        "FORCE-05", "forced-masked-softmax", "route", "rank 0 has the loads [", "per expert; expected for round_robin"
    ),
    Expectation(
        "FORCE-05", "forced-masked-sigmoid", "route", "forced routing round_robin was requested, accepted and ignored"
    ),
)
class MaskedAreReplaced(ForcedRouter):
    """A token that is forced to an expert at -inf goes back to those that the router likes best."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        self.masked_TE = super()._logits(x_TD) == -torch.inf
        return super()._logits(x_TD)

    def _select(self, scores_TE: Tensor) -> Tensor:
        if self.strategy != "round_robin":
            return super()._select(scores_TE)
        dealt_TK, best_TK = super()._select(scores_TE), Router._select(self, scores_TE)
        return torch.where(self.masked_TE.gather(1, dealt_TK).any(1, keepdim=True), best_TK, dealt_TK)
