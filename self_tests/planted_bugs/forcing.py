"""FORCE: bugs of routers that a strategy forces."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native.forcing import ForcedRouter
from moe_conformance.backends.native.routing import Router
from moe_conformance.contract import Routed
from self_tests.planted_bugs.plant import Expectation, collect, planted

# ---- groups --------------------------------------------------------------------------------------------------------


@planted(
    Expectation("FORCE-18", "forced-random-groups", "route", "and the router opens 2", "behind the group limit"),
    Expectation("FORCE-18", "forced-biased-groups", "route", "and the router opens 2", "behind the group limit"),
)
class ForcedBehindTheLimit(ForcedRouter):
    """Random logits take the place of those that the group limit has masked, so that every group is open again."""

    def _mask_groups(self, choice_TE: Tensor, groups: int, chosen: int) -> Tensor:
        return choice_TE


@planted(
    Expectation("FORCE-18", "forced-random-groups", "route", "groups that the router's own logits open"),
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
    Expectation("FORCE-18", "forced-round-robin-groups", "route", "were held to the groups"),
    Expectation("FORCE-18", "forced-round-robin-small-groups", "route", "rank 0 loads its experts with"),
)
class ForcedIdsFiltered(ForcedRouter):
    """Forced ids in groups that are closed to a token give way to the best of the open ones."""

    def _choose(self, scores_TE: Tensor) -> Tensor:
        if self.strategy != "round_robin":
            return super()._choose(scores_TE)
        favour_TE = torch.zeros_like(scores_TE).scatter(1, super()._choose(scores_TE), 1e3)
        favour_TE = (favour_TE + scores_TE.detach()).masked_fill(~self._open(scores_TE), -torch.inf)
        return favour_TE.topk(self.config.top_k).indices

    def _open(self, scores_TE: Tensor) -> Tensor:
        assert self.config.groups is not None
        return self._mask_groups(scores_TE.detach(), *self.config.groups) > -torch.inf


@planted(
    Expectation("FORCE-18", "forced-random-groups", "route", "random was asked for, accepted and ignored"),
    Expectation("FORCE-18", "forced-round-robin-groups", "route", "round_robin was asked for, accepted and ignored"),
    Expectation("FORCE-03", "forced-round-robin-groups", "route", "round_robin was asked for, accepted and ignored"),
)
class NothingForced(ForcedRouter):
    """The setting is taken, and the router goes on choosing by itself."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return Router._logits(self, x_TD)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        return Router._choose(self, scores_TE)


# ---- loads ---------------------------------------------------------------------------------------------------------


@planted(Expectation("FORCE-03", "forced-round-robin-groups", "route", "leaves no load more than one above another"))
class EveryTokenBeginsAtTheFirst(ForcedRouter):
    """Experts are dealt out to the slots of a token, and anew to those of the next."""

    def _deal(self, tokens: int, device: torch.device) -> Tensor:
        return torch.arange(self.config.top_k, device=device).repeat(tokens, 1)


@planted(Expectation("FORCE-02", "forced-random-groups-biased", "route", "reports the load", "its tokens chose"))
class LoadOfItsOwnChoice(ForcedRouter):
    """The load is counted of what the router would have chosen itself."""

    def forward(self, x: Tensor, padding_mask_T: Tensor | None = None) -> Routed:
        own_TE = Router._logits(self, x.reshape(-1, x.shape[-1]))
        counts_E = torch.bincount(
            Router._choose(self, self._scores(own_TE)).flatten(), minlength=self.config.experts
        )
        return replace(super().forward(x, padding_mask_T), counts_E=counts_E)


# ---- weights and gradients -----------------------------------------------------------------------------------------


@planted(Expectation("FORCE-05", "forced-round-robin-groups", "route", "experts that the router would have"))
class WeightsOfTheReplaced(ForcedRouter):
    """Forced experts get the weights of those whose place they take."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        if self.strategy == "round_robin":
            ids_TK = Router._choose(self, scores_TE)
        return super()._weights(scores_TE, ids_TK)


@planted(Expectation("FORCE-05", "forced-round-robin-one-group", "route", "as if they were not normalised"))
class ForcedAreNotNormalised(ForcedRouter):
    """The weights of forced experts are left undivided, as they are not the best ones."""

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return scores_TE.gather(1, ids_TK) * self.config.scale


@planted(
    Expectation("FORCE-07", "forced-random-groups", "gradient", "no gradient goes back through the forced"),
    Expectation("FORCE-07", "forced-kept-bias-groups", "gradient", "no gradient goes back through the forced"),
)
class NoGradientOfForcedLogits(ForcedRouter):
    """Nothing goes back through forced logits, and the router stands still."""

    def _replace(self, own_TE: Tensor, forced_TE: Tensor) -> Tensor:
        return forced_TE + 0 * own_TE


PLANTS = collect(globals())
