"""The routers of a model with the losses that train them: attached, scaled, recomputed, reported.

T tokens, K slots, E experts, D hidden, S positions of B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_conformance.backends.native.layer.gradients import Replicated
from moe_conformance.backends.native.offered import offers
from moe_conformance.backends.native.router.losses import RouterLosses, Tokens
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Claims, Config, Named, Read, Routed, Routing, Topology, Trained

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession

Built = TypeVar("Built")
Use = Callable[[type[Built]], type[Built]]


class Attach(torch.autograd.Function):
    """Returns its first argument, and adds the gradient of the second, times a factor, in the backward.

    Implements: LOSS-10.
    """

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, loss: Tensor, factor: Tensor) -> Tensor:
        """Keep the factor."""
        ctx.save_for_backward(factor)
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Hand the gradient on."""
        (factor,) = ctx.saved_tensors
        return gradients[0], factor, None


class TrainingRouters(Replicated):
    """One router for each layer, each charged for its own tokens.

    Implements: LOSS-18.
    """

    replicas = ("dp_cp", "tp")

    def __init__(self, config: Config, topology: Topology, routers: list[Router], losses: RouterLosses) -> None:
        """Take the routers, and what charges each of them."""
        super().__init__()
        self.config, self.topology, self.losses = config, topology, losses
        self.routers = nn.ModuleList(routers)
        self.finish_gradients: Callable[[TrainingRouters], None]  # the session's
        self.microbatches, self.scale = 1, 1.0
        self.sums: dict[str, Tensor] = {}  # this rank's shares since the last report, over layers and microbatches
        self.charged = 0  # forwards since the last report
        self.begin_counts()

    def begin_counts(self) -> None:
        """Forget the counts of the step before.

        Implements: LOSS-07.
        """
        E, L = self.config.experts, len(self.routers)
        device = next(self.parameters()).device
        self.counts_LE = torch.zeros(L, E, dtype=torch.int64, device=device)
        self.tokens_L = torch.zeros(L, dtype=torch.int64, device=device)

    @property
    def resolved(self) -> Mapping[str, str]:
        """The classes that were built."""
        return {"routers": type(self).__name__, "charged by": type(self.losses).__name__}

    @property
    def claims(self) -> Claims:
        """The mean over microbatches and data parallel groups, reported without the coefficient."""
        return Claims()

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the router of every layer under its number, and its balance bias if there is one."""
        for number, router in enumerate(self.routers):
            for window in router.named(read):  # type: ignore[operator]
                yield Named(window.name, number, window.view)

    def begin_step(self, microbatches: int, scale: float) -> None:
        """Keep what losses are scaled by."""
        self.microbatches, self.scale = microbatches, scale
        self.begin_counts()

    def forward(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        """Route every layer's tokens, and charge for them where there is something to train."""
        if not self.charges():
            routed = [self._route(number, x_SBD, padding_mask_T) for number, x_SBD in enumerate(x)]
            return Trained(tuple(routed))
        self.charged += 1
        return Trained(tuple(self._train(number, x_SBD, padding_mask_T) for number, x_SBD in enumerate(x)))

    def charges(self) -> bool:
        """Whether this forward is one of training.

        Implements: LOSS-16.
        """
        return self.training and torch.is_grad_enabled()

    def _route(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Routed:
        routed: Routed = self.routers[number](x, padding_mask_T)
        return routed

    def _train(self, number: int, x: Tensor, padding_mask_T: Tensor | None) -> Routed:
        """Route, charge and count once, whether the forward runs again in the backward or not.

        Implements: LOSS-15.
        """
        arguments = (number, x, padding_mask_T, self.counts_LE[number], self.tokens_L[number])
        if self.config.losses.recompute:
            parts = checkpoint(self._charged, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            parts = self._charged(*arguments)
        ids_TK, weights_TK, logits_TE, load_E, counts_E, tokens, shares = parts
        self.counts_LE = self.counts_LE.index_put((torch.tensor(number),), counts_E)
        self.tokens_L = self.tokens_L.index_put((torch.tensor(number),), tokens)
        self.note(shares)
        return Routed(Routing(ids_TK, weights_TK, self.config.experts), logits_TE, load_E)

    def note(self, shares: Mapping[str, Tensor]) -> None:
        """Add shares to what is reported."""
        for name, share in shares.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(share)) + share

    def _charged(
        self, number: int, x: Tensor, padding_mask_T: Tensor | None, counts_E: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, dict[str, Tensor]]:
        """Route, and charge for the logits that the router counted, forced or its own.

        Implements: FORCE-16.
        """
        routed = self._route(number, x, padding_mask_T)
        assert routed.logits_TE is not None  # native's router returns them
        T, B = len(routed.logits_TE), x.shape[1]
        valid_T = torch.ones(T, dtype=torch.bool, device=x.device) if padding_mask_T is None else ~padding_mask_T
        sequence_T = torch.arange(T, device=x.device) % B
        tokens = Tokens(routed.logits_TE, valid_T, sequence_T, B, routed.routing.ids_TK)
        charged = self.losses.charge(tokens, counts_E, before)
        weights_TK = routed.routing.weights_TK
        for name, share in charged.shares.items():
            weights_TK = self.attach(weights_TK, share, self.factor(name, charged.weight[name]).to(share.dtype))
        shares = {name: share.detach() for name, share in charged.shares.items()}
        logits_TE = routed.logits_TE.detach()
        ids_TK, load_E = routed.routing.ids_TK, routed.counts_E
        return ids_TK, weights_TK, logits_TE, load_E, charged.counts_E, charged.tokens, shares

    def attach(self, weights_TK: Tensor, share: Tensor, factor: Tensor) -> Tensor:
        """Return the weights, through whose backward the loss is trained."""
        attached: Tensor = Attach.apply(weights_TK, share, factor)  # type: ignore[no-untyped-call]
        return attached

    def factor(self, name: str, tokens: Tensor) -> Tensor:
        """Return what the gradient of a loss about so many tokens is multiplied by before ranks are summed.

        Implements: LOSS-08, LOSS-11, LOSS-13.
        """
        if self.config.losses.per_token:
            return self.scale * tokens
        groups = 1 if name == "global_batch" else self.topology.sizes["dp"]
        return torch.full_like(tokens, self.scale / (self.microbatches * groups), dtype=torch.float64)

    def finish(self, tokens: int) -> None:
        """Sum gradients over ranks, and divide them by the tokens of the step if that is asked for."""
        self.finish_gradients(self)
        if not self.config.losses.per_token:
            return
        total = torch.tensor(tokens)
        if self.topology.group("dp_cp").size() > 1:
            dist.all_reduce(total, group=self.topology.group("dp_cp"))
        for parameter in self.parameters():
            assert parameter.grad is not None  # finished
            parameter.grad /= total.clamp_min(1)

    def report(self) -> Mapping[str, Tensor]:
        """Return the mean of every loss since the last report.

        Implements: LOSS-19.
        """
        means = {name: self.mean(name, share) for name, share in self.sums.items()}
        self.sums, self.charged = {}, 0
        return means

    def mean(self, name: str, share: Tensor) -> Tensor:
        """Return the mean over microbatches, data parallel groups and routers, without the coefficient."""
        groups = 1 if name == "global_batch" else self.topology.sizes["dp"]
        value = self.losses.over_step(share) / (self.charged * groups * len(self.routers))
        return value / self.losses.coefficient(name)


@offers("training_routers", maps=("losses",))
def training_routers(session: NativeSession, config: Config) -> TrainingRouters:
    """Build the routers of a model with their losses."""
    routers = [session.router(replace(config, losses=Config.losses)) for _ in range(config.losses.layers)]
    losses = session.use(RouterLosses)(config, session.topology)
    built = session.use(TrainingRouters)(config, session.topology, routers, losses)
    built.finish_gradients = session.finish_gradients
    return built
