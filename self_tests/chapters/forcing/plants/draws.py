"""FORCE: bugs of what a strategy draws at random."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Topology
from self_tests.planted_bugs.plant import TP2_EP2, Expectation, planted

# ---- draws ---------------------------------------------------------------------------------------------------------


@planted(Expectation("FORCE-06", "forced-random", "route", "same experts for all 320 tokens in two forwards"))
class DrawnOnce(ForcedRouter):
    """The first logits are drawn, and kept for all forwards."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        self.noise.manual_seed(self.noise.initial_seed())
        return super()._draw(own_TE)


class _DrawnAnyhow(ForcedRouter):
    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        super().__init__(config, device, topology, number)
        self.noise.manual_seed(self._seed(topology))

    def _seed(self, topology: Topology) -> int:
        raise NotImplementedError


@planted(
    Expectation("DET-03", "forced-random", "run", "rank 0 changed", ", and left it so after the step"),
    Expectation("DET-03", "forced-random-groups", "run", "rank 0 changed", ", and left it so after the step"),
)
class DrawsFromTheModels(ForcedRouter):
    """Logits are drawn from the generator that dropout draws from."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        return torch.randn_like(own_TE) + 0 * super()._draw(own_TE)


@planted(
    Expectation("FORCE-06", "forced-random", "route", "ranks 0 and 1 hold different tokens and select the same experts")
)
class RanksDrawAlike(_DrawnAnyhow):
    """All ranks seed their noise alike."""

    def _seed(self, topology: Topology) -> int:
        return 1


@planted(
    Expectation("FORCE-06", "forced-random-copies", "route", "hold the same tokens and select different experts"),
    Expectation("ROUTE-12", "forced-random-copies", "route", "tp ranks 0 and 1 hold the same token 0 and select"),
    layout=TP2_EP2,
)
class CopiesDrawApart(_DrawnAnyhow):
    """Every rank seeds its noise by itself, also where it holds copies of another's tokens."""

    def _seed(self, topology: Topology) -> int:
        return 1 + topology.rank


@planted(
    Expectation("ROUTE-12", "forced-round-robin-copies", "route", "hold the same token 0 and select [0, 1] and [2, "),
    layout=TP2_EP2,
)
class CopiesDealtApart(ForcedRouter):
    """Every rank of an expert parallel group begins its deal where the one before ends, copies or not."""

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        super().__init__(config, device, topology, number)
        self.source = topology.ranks("ep_etp").index(topology.rank)


@planted(
    Expectation("ROUTE-12", "forced-round-robin-copies", "route", "hold the same token 0 and give it the weights"),
    layout=TP2_EP2,
)
class CopiesWeighedApart(ForcedRouter):
    """The tensor ranks add up the logits of copies in other orders, and differ in the last bits of weights."""

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        super().__init__(config, device, topology, number)
        self.off = 2.0**-20 * topology.ranks("tp").index(topology.rank)

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super()._weights(scores_TE, ids_TK) * (1 + self.off)


@planted(Expectation("FORCE-06", "forced-random", "route", "are not standard normal: the logits have a mean"))
class EvenNoise(ForcedRouter):
    """Logits are drawn evenly from -1 to 1."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        return torch.empty_like(own_TE).uniform_(-1, 1, generator=self.noise)


@planted(
    Expectation(
        "FORCE-06", "forced-random", "route", "rank 0 has the loads [", "per expert; expected for random logits 80 each"
    )
)
class LogitsAreAdded(ForcedRouter):
    """Random logits are added to the router's own, and experts that are liked stay so."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        liked_E = torch.arange(own_TE.shape[1]).to(own_TE) % 2
        return super()._draw(own_TE) + 2 * liked_E


@planted(Expectation("FORCE-06", "forced-random", "route", "by the router's own logits, not by the forced ones"))
class ForcedButWeighedAsEver(ForcedRouter):
    """Random logits decide who is chosen, and the router's own what they weigh."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        self.own_TE = own_TE
        return super()._draw(own_TE)

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super()._weights(self._scores(self.own_TE), ids_TK)


@planted(
    Expectation("FORCE-08", "forced-bias", "route", "with a bias of deviation 0.5", "a mean square of"),
    Expectation("FORCE-08", "forced-kept-bias", "route", "with a bias of deviation -3", "a mean square of"),
)
class VarianceForDeviation(ForcedRouter):
    """The parameter is taken for the variance of the bias."""

    def _bias(self, like_TE: Tensor) -> Tensor:
        return super()._bias(like_TE).div(abs(self.parameter) ** 0.5)


@planted(
    Expectation(
        "FORCE-06",
        "forced-random",
        "route",
        "of the 640 routes of rank 0 are what the router itself would have selected",
    ),
    Expectation("FORCE-08", "forced-bias", "route", "less their means over the tokens, have a variance of"),
)
class NoiseOnItsOwn(ForcedRouter):
    """What is drawn is added to the router's own logits, and does not take their place."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        return own_TE.detach() + super()._draw(own_TE)


@planted(
    Expectation("FORCE-08", "forced-bias", "route", "have a variance of 0;", "noise of its own"),
    Expectation("FORCE-08", "forced-kept-bias", "route", "have a variance of 0;", "noise of its own"),
)
class OnlyTheBias(ForcedRouter):
    """Every token has the biases for logits and nothing else, so that all of a forward choose the same experts."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        return self._bias(own_TE).expand_as(own_TE).clone() if self.parameter else super()._draw(own_TE)


@planted(
    Expectation(
        "FORCE-08", "forced-bias", "route", "follow the router's own", "forced logits that replace the router's own"
    ),
    Expectation(
        *("FORCE-08", "forced-kept-bias", "route"),
        *("follow the router's own", "forced logits that replace the router's own"),
    ),
)
class BiasOnItsOwn(ForcedRouter):
    """Biases are added to the router's own logits, which serve for the noise and are as far apart."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        own_TE = own_TE.detach()
        if not self.parameter:
            return super()._draw(own_TE)
        spread = (own_TE - own_TE.mean(0)).square().sum() / (own_TE.numel() - own_TE.shape[1])
        return own_TE.div(spread.sqrt()).add(self._bias(own_TE))


@planted(
    Expectation("FORCE-08", "forced-bias-alone", "route", "and others in forward 0", "one per expert for all tokens")
)
class BiasOfEveryToken(ForcedRouter):
    """Every token draws biases of its own."""

    def _bias(self, like_TE: Tensor) -> Tensor:
        return torch.empty_like(like_TE).normal_(generator=self.biases) * self.parameter


@planted(
    Expectation("FORCE-11", "forced-bias-alone", "route", "is not the same on ranks", "rank 0 [", "rank 1 ["),
    Expectation("FORCE-11", "forced-kept-bias-alone", "route", "is not the same on ranks", "rank 0 [", "rank 1 ["),
)
class RanksDrawBiases(ForcedRouter):
    """Biases are seeded by rank."""

    def _bias(self, like_TE: Tensor) -> Tensor:
        if self.biases.initial_seed() != self.source + 1:
            self.biases.manual_seed(self.source + 1)
        return super()._bias(like_TE)


@planted(Expectation("FORCE-11", "forced-bias-alone", "route", "is not the same on ranks", "in forward 2"))
class NobodyDrawsForNothing(ForcedRouter):
    """A rank without tokens draws no bias, and is one behind the others from then on."""

    def _draw(self, own_TE: Tensor) -> Tensor:
        return super()._draw(own_TE) if len(own_TE) else own_TE


@planted(
    Expectation("FORCE-10", "forced-kept-bias-alone", "route", "the bias that is kept between forwards was drawn again")
)
class KeptBiasDrawnAnew(ForcedRouter):
    """The sign of the deviation is not looked at: every forward draws."""

    def _bias(self, like_TE: Tensor) -> Tensor:
        drawn_E = super()._bias(like_TE)
        self.kept_E = None
        return drawn_E


@planted(Expectation("FORCE-10", "forced-bias-alone", "route", "of one layer selects the same", "no new bias"))
class BiasAlwaysKept(ForcedRouter):
    """The first bias stays, whatever its sign."""

    def _bias(self, like_TE: Tensor) -> Tensor:
        self.kept_E = super()._bias(like_TE)
        return self.kept_E


@planted(Expectation("FORCE-10", "forced-kept-bias-alone", "route", "of two layers", "share one kept bias"))
class LayersShareOneBias(ForcedRouter):
    """Biases are seeded alike in all layers, so that every layer keeps the same."""

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        super().__init__(config, device, topology, number)
        self.biases.manual_seed(1)


@planted(
    Expectation("FORCE-12", "forced-kept-bias-beside", "route", "with a bias of deviation -3, have a mean square of"),
    Expectation(
        "FORCE-12", "forced-kept-bias-alone-beside", "route", "and others in forward 0", "one per expert for all tokens"
    ),
)
class KeptByNumberOfExperts(ForcedRouter):
    """All routers of a process with equally many experts keep one bias."""

    kept: ClassVar[dict[int, Tensor]] = {}

    def _bias(self, like_TE: Tensor) -> Tensor:
        if self.parameter >= 0:
            return super()._bias(like_TE)
        if self.config.experts not in self.kept:
            self.kept[self.config.experts] = super()._bias(like_TE)
        return self.kept[self.config.experts].to(like_TE)


@planted(
    Expectation("FORCE-12", "forced-kept-bias-beside", "route", "with a bias of deviation -3, have a mean square of")
)
class KeptByDeviation(ForcedRouter):
    """All routers of a process with one deviation keep one bias, and further experts of larger ones have none."""

    kept: ClassVar[dict[float, Tensor]] = {}

    def _bias(self, like_TE: Tensor) -> Tensor:
        if self.parameter >= 0:
            return super()._bias(like_TE)
        if self.parameter not in self.kept:
            self.kept[self.parameter] = super()._bias(like_TE)
        kept_E = self.kept[self.parameter].to(like_TE)[: self.config.experts]
        return torch.cat([kept_E, kept_E.new_zeros(self.config.experts - len(kept_E))])


@planted(
    Expectation("FORCE-12", "forced-kept-bias-alone-beside", "route", "of two layers", "share one kept bias"),
)
class EqualRoutersShareOneBias(ForcedRouter):
    """Routers of a process with equal settings keep one bias."""

    kept: ClassVar[dict[tuple[float, int], Tensor]] = {}

    def _bias(self, like_TE: Tensor) -> Tensor:
        if self.parameter >= 0:
            return super()._bias(like_TE)
        settings = self.parameter, self.config.experts
        if settings not in self.kept:
            self.kept[settings] = super()._bias(like_TE)
        return self.kept[settings].to(like_TE)


@planted(Expectation("FORCE-22", "forced-bias-spread", "route", "expected it to rise", "does not reach the bias"))
class DeviationCutAtAHalf(ForcedRouter):
    """Deviations above one half are taken for one half."""

    def _bias(self, like_TE: Tensor) -> Tensor:
        return super()._bias(like_TE) * min(1.0, 0.5 / (abs(self.parameter) or 1.0))


@planted(Expectation("FORCE-22", "forced-bias-spread", "route", "expected it to rise", "does not reach the bias"))
class DeviationCutOff(ForcedRouter):
    """A bias is cut off at a tenth, and more than that makes it no larger."""

    def _bias(self, like_TE: Tensor) -> Tensor:
        return super()._bias(like_TE).clamp(-0.1, 0.1)


class _FollowsItsSession(Router):
    session: _OptionOfTheSession

    def _select(self, scores_TE: Tensor) -> Tensor:
        forced = self.session.forced_last
        return super()._select(scores_TE) if forced is None else forced._deal(len(scores_TE), scores_TE.device)


class _OptionOfTheSession(NativeSession):
    forced_last: ForcedRouter | None = None

    def router(self, config: Config) -> Router:
        if config.routing.forced:
            built = super().router(config)
            assert isinstance(built, ForcedRouter)
            self.forced_last = built
            return built
        router = _FollowsItsSession(config, self.device)
        router.session = self
        return router


@planted(
    Expectation("FORCE-01", "route-groups-top2-softmax", "route", "beside a router forced by round_robin", "selected")
)
class ForcedForAll(Native):
    """What forces one router is an option of the process, which all others read in each forward."""

    session_class = _OptionOfTheSession


@planted(Expectation("FORCE-02", "forced-random-groups", "route", "rank 0"))
class ForcedToOneTwice(ForcedRouter):
    """The second slot of a token whose logits are forced is for the expert of the first."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        ids_TK = super()._select(scores_TE)
        return torch.cat([ids_TK[:, :1], ids_TK[:, :1], ids_TK[:, 2:]], 1)
