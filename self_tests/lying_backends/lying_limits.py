"""Backends that exclude by their own word what they do wrongly, or all that they are for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_conformance.backends.native import NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, LocalExchange
from moe_conformance.contract import Config, Limit, Unsupported
from self_tests.lying_backends.lying import Liar

# Of nearly all that a limit may be on; nothing proves any of them.
UNPROVED = (
    Limit("dtype", (torch.float32,), "untested", proof="undefined"),
    Limit("sharded_experts", (False,), "untested", proof="undefined"),
    Limit("tokens", range(1, 1 << 20), "untested", proof="undefined"),
    Limit("token_dims", (1,), "untested", proof="undefined"),
    Limit("in_flight", (1, 2), "untested", proof="undefined"),
    Limit("halves_in_flight", (1,), "untested", proof="undefined"),
    Limit("steps", (1,), "untested", proof="undefined"),
    *(
        Limit(on, (False,), "untested", proof="undefined")
        for on in (
            "zero_tokens", "duplicate_experts", "zero_weights", "negative_weights", "recomputed", "deterministic",
            "wrong_use",
        )
    ),
)  # fmt: skip


class _RightInFloat32(AllToAllExchange):
    def combine(self, rows: Tensor, handle: object) -> Tensor:
        y = super().combine(rows, handle)
        return y if y.dtype == torch.float32 else 2 * y


class FourteenLimits(Liar):
    """Is wrong in every dtype but float32, and declares these and thirteen more things as limits."""

    name = "lying-fourteen-limits"
    session_class = NativeSession.building(_RightInFloat32)

    def limits(self, variant: str) -> Sequence[Limit]:
        """Return limits that nothing proves."""
        return UNPROVED


class _FewSession(NativeSession):
    def exchange(self, config: Config) -> LocalExchange:
        if config.dtype != torch.float32 or config.top_k > 2:
            raise Unsupported("not today")
        return _RightInFloat32(config, self.topology)


class RefusesWhatItDoesWrongly(Liar):
    """Is wrong in every dtype but float32, and refuses these, and K > 2, as the adapter."""

    name = "lying-refuses-what-it-does-wrongly"
    session_class = _FewSession


class _OneRankSession(NativeSession):
    def exchange(self, config: Config) -> LocalExchange:
        if self.topology.sizes["ep"] > 1:
            raise Unsupported("no expert parallelism today")
        return AllToAllExchange(config, self.topology)


class RefusesAllOfEp(Liar):
    """Has an exchange that refuses all of ep > 1, beside a router that is right on every layout."""

    name = "lying-refuses-all-of-ep"
    session_class = _OneRankSession


class ExcludesAllOfEp(Liar):
    """Excludes all of ep > 1 by a limit."""

    name = "lying-excludes-all-of-ep"

    def limits(self, variant: str) -> Sequence[Limit]:
        """Return the limit, which nothing proves."""
        return (Limit("spread_experts", (False,), "untested", proof="undefined"),)


class TwoVariants(Liar):
    """Has two variants, of which `OneVariantGone` has the first."""

    name = "lying-two-variants"
    variants = ("alltoall", "allgather")  # type: ignore[assignment]


class OneVariantGone(TwoVariants):
    """Has one of two variants."""

    name = "lying-one-variant-gone"
    variants = ("alltoall",)  # type: ignore[assignment]
