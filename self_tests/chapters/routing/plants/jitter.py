"""ROUTE: bugs of input jitter, in training and outside, and of random routes under activation recomputation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe_conformance.backends.native.layer.layer import Layer
from moe_conformance.backends.native.recomputation import Recomputation
from moe_conformance.backends.native.router.forcing import ForcedRouter, State
from moe_conformance.backends.native.router.routing import Router
from self_tests.planted_bugs.plant import EP2, SINGLE, Expectation, planted


@planted(
    Expectation("ROUTE-18", "jitter", "route", "likely cause: the logits are multiplied by factors"),
    real="NVIDIA/Megatron-LM commit e9204a5f36",
    layout=SINGLE,
)
class JitterOfLogits(Router):
    """The factors multiply the logits, behind the gate."""

    def _jittered(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def _logits(self, x_TD: Tensor) -> Tensor:
        return super()._jittered(super()._logits(x_TD))


@planted(Expectation("ROUTE-18", "jitter", "route", "the columns of a token have factors in common"))
class OneFactorPerToken(Router):
    """All elements of a token are multiplied by the same factor."""

    def _factors(self, x_TD: Tensor) -> Tensor:
        return super()._factors(x_TD[:, :1]).expand_as(x_TD)


@planted(Expectation("ROUTE-18", "jitter", "route", "neighbouring tokens have factors in common"), layout=SINGLE)
class OneFactorPerColumn(Router):
    """All tokens of a batch are multiplied by the same factors."""

    def _factors(self, x_TD: Tensor) -> Tensor:
        few_TD = super()._factors(x_TD[:1])
        ranks_D = few_TD.flatten().argsort().argsort()  # evenly spaced in a drawn order: few draws may lie unevenly
        even_D = 1 + self.config.jitter * (2 * (ranks_D + 0.5) / len(ranks_D) - 1)
        return even_D.to(x_TD.dtype).expand_as(x_TD)


@planted(Expectation("ROUTE-18", "jitter", "route", "two calls on rank 0 have factors in common"))
class JitterDrawnOnce(Router):
    """A forward seeds its generator, and draws the same factors as the one before."""

    def _factors(self, x_TD: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return super()._factors(x_TD)


@planted(Expectation("ROUTE-18", "jitter", "route", "expected: between 0.75 and 1.25"), layout=SINGLE)
class JitterIsNormal(Router):
    """The size of the jitter is taken for a standard deviation."""

    def _factors(self, x_TD: Tensor) -> Tensor:
        return 1 + self.config.jitter * torch.randn_like(x_TD)


@planted(Expectation("ROUTE-18", "jitter", "gradient", "it is not multiplied by the factors"))
class JitterWithoutGradient(Router):
    """The noise is added to x as a constant, so that the gradient passes as if there was none."""

    def _jittered(self, x_TD: Tensor) -> Tensor:
        return x_TD + (super()._jittered(x_TD) - x_TD).detach()


@planted(Expectation("ROUTE-18", "layer-jittered-even-bfloat16", "combine", "y of rank 0 token"))
class JitterReachesTheExperts(Layer):
    """The tokens with jitter are those that are dispatched."""

    def forward(self, x: Tensor) -> Tensor:
        jittered_TD = self.router._jittered(x.reshape(-1, x.shape[-1])) if self.config.jitter else x
        return super().forward(jittered_TD.reshape(x.shape))


@planted(
    Expectation("ROUTE-18", "layer-jittered-even-bfloat16", "combine", "y of rank 0", "is torch.float32"),
    real="NVIDIA/Megatron-LM commit 20b395424d (!3774)",
)
class JitterWidensTheTokens(Layer):
    """Factors of float32 make float32 of tokens in half precision, and the layer goes on with that."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.float() if self.config.jitter and self.training else y


@planted(
    Expectation("ROUTE-19", "jitter", "route", "in evaluation mode", "likely cause: noise that is for training alone"),
    real="NVIDIA/Megatron-LM 0.16.1, TopKRouter.apply_input_jitter",
)
class JitterInEvaluation(Router):
    """The jitter does not ask for the mode."""

    def _jittered(self, x_TD: Tensor) -> Tensor:
        return x_TD * self._factors(x_TD) if self.config.jitter else x_TD


@planted(Expectation("ROUTE-19", "jitter", "route", "in evaluation mode", "the logits of rank 0"), layout=SINGLE)
class LastJitterInEvaluation(Router):
    """Outside training the factors of the last batch are kept, with which two calls agree."""

    kept_TD: Tensor | None = None

    def _jittered(self, x_TD: Tensor) -> Tensor:
        if not self.config.jitter:
            return x_TD
        if self.training or self.kept_TD is None:
            self.kept_TD = self._factors(x_TD)
        return x_TD * self.kept_TD


@planted(
    Expectation("ROUTE-20", "recomputed-jitter", "gradient", "run with activation recomputation, dx of rank 0 token"),
    layout=EP2,
)
class JitterDrawnAgain(Recomputation):
    """The state of the generators is not put back, to save a copy."""

    def run(self, call: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        with set_checkpoint_early_stop(False):
            result: Tensor = checkpoint(call, *inputs, use_reentrant=False, preserve_rng_state=False)
            return result


@planted(
    Expectation("ROUTE-20", "recomputed-forced-random", "gradient", "run with activation recomputation, dx of rank 0"),
    layout=SINGLE,
)
class ForcedDrawnAgain(Recomputation):
    """The default generators are put back, and not those that forced logits are drawn from."""

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), nullcontext()


@planted(
    Expectation(
        *("ROUTE-20", "recomputed-forced-alternating", "gradient"),
        "run with activation recomputation, dx of rank 0",
    ),
    layout=EP2,
)
class AlternatesInTheBackward(ForcedRouter):
    """Generators are put back for a recomputed forward, and not the number of forwards by which the hot spot moves."""

    def put(self, state: State) -> None:
        """Keep the number of forwards."""
        super().put((*state[:3], self.forwards))
