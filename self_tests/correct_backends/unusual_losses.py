"""Routers whose losses follow another convention, and which say so: they must pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.router.losses import Charged, RouterLosses, Tokens
from moe_conformance.backends.native.router.training import TrainingRouters
from moe_conformance.contract import Claims, Trained


class _Summed(TrainingRouters):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, loss_gradients="sum")

    def factor(self, name: str, tokens: Tensor) -> Tensor:
        return (
            super().factor(name, tokens)
            if self.config.losses.per_token
            else torch.full_like(tokens, self.scale, dtype=torch.float64)
        )


class Summed(Native):
    """Losses are summed over microbatches and data parallel groups."""

    session_class = NativeSession.building(_Summed)


class _Returned(TrainingRouters):
    def forward(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        self.shares: list[Tensor] = []
        trained = super().forward(x, padding_mask_T)
        return replace(trained, loss=torch.stack(self.shares).sum()) if self.shares else trained

    def attach(self, weights_TK: Tensor, share: Tensor, factor: Tensor) -> Tensor:
        self.shares.append(share)
        return weights_TK


class Returned(Native):
    """Losses are returned, and the caller adds them; on one data parallel rank there is nothing else to divide by."""

    session_class = NativeSession.building(_Returned)


class _ReturnedAlone(_Returned):
    def report(self) -> None:
        super().report()


class ReturnedAlone(Native):
    """Losses are returned, and none is reported."""

    session_class = NativeSession.building(_ReturnedAlone)


class _ReturnedTwice(_ReturnedAlone):
    def forward(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        trained = super().forward(x, padding_mask_T)
        return trained if trained.loss is None else replace(trained, loss=2 * trained.loss)


class ReturnedTwice(Native):
    """It is wrong: it returns twice the losses, and reports none."""

    session_class = NativeSession.building(_ReturnedTwice)


class _OfTokens(RouterLosses):
    def fractions(self, n_E: Tensor, tokens: Tensor, slots: int) -> Tensor:
        return super().fractions(n_E, tokens, 1)


class _SaysOfTokens(TrainingRouters):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, loss_fractions="tokens")


class OfTokens(Native):
    """Fractions add up to K, as in transformers."""

    session_class = NativeSession.building(_OfTokens, _SaysOfTokens)


class _Forgetful(RouterLosses):
    def charge(self, tokens: Tokens, counts_E: Tensor, before: Tensor) -> Charged:
        return super().charge(tokens, torch.zeros_like(counts_E), torch.zeros_like(before))


class _SaysForgetful(TrainingRouters):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, global_counts="microbatch", reported_losses="with_coefficient")

    def mean(self, name: str, share: Tensor) -> Tensor:
        return super().mean(name, share) * self.losses.coefficient(name)


class Forgetful(Native):
    """The global loss counts the present microbatch alone, and reports have the coefficient in them."""

    session_class = NativeSession.building(_Forgetful, _SaysForgetful)


class _OwnZ(TrainingRouters):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, reported_z="own")

    def report(self) -> Mapping[str, Tensor]:
        ranks = self.topology.sizes["tp"] * self.topology.sizes["cp"]
        own = self.sums.get("z")
        times = ranks / (max(1, self.charged) * len(self.routers) * (self.losses.coefficient("z") or 1.0))
        means = dict(super().report())
        return means if own is None else {**means, "z": own * times}


class OwnZ(Native):
    """Every rank reports the z-loss of its own tokens."""

    session_class = NativeSession.building(_OwnZ)


class _SaysSummed(TrainingRouters):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, loss_gradients="sum")


class SaysSummed(Native):
    """It lies: it claims sums, and losses are averaged."""

    session_class = NativeSession.building(_SaysSummed)


class _SaysOfTokensAlone(TrainingRouters):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, loss_fractions="tokens", global_counts="microbatch")


class SaysOfTokens(Native):
    """It lies: it claims fractions that add up to K and counts of one microbatch."""

    session_class = NativeSession.building(_SaysOfTokensAlone)
