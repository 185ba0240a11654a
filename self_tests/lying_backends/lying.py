"""Backends that lie: native behind one dishonest adapter each, for whoever wants to see a suite catch them.

A planted bug computes something wrong. A liar says something wrong about a sound computation, or does what
an adapter must not do. Liars are found by dotted path alone, `self_tests.lying_backends.lying:WrongCounts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange
from moe_conformance.backends.native.exchange.token_padding import ClaimingExchange
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Claims, Config, Delivery, Named, Read, Routing, SplitExchange, Unsupported
from moe_conformance.contract.topology import RankLists
from self_tests.correct_backends.unusual import (
    CapacityOnTheWire,
)


class Liar(Native):
    """What the liars have in common: the one variant that all of them lie about."""

    variants = ("alltoall",)


# ---- about what was delivered ------------------------------------------------------------------------------


class _OneRowMore(AllToAllExchange):
    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        assert delivery.counts_N is not None  # native always claims counts
        return replace(delivery, counts_N=delivery.counts_N + 1), handle


class WrongCounts(Liar):
    """Claims one row more than it delivers, for every expert."""

    name = "lying-wrong-counts"
    session_class = NativeSession.building(_OneRowMore)


class _WeightsAtExpertSession(NativeSession):
    weights_at = "expert"


class WrongPlace(Liar):
    """Claims that the experts get the weights; they are applied in combine."""

    name = "lying-wrong-place"
    session_class = _WeightsAtExpertSession


class _SaysTokens(AllToAllExchange):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, wire="tokens")


class WrongWire(Liar):
    """Claims one row for each token and destination rank; a row for each routed pair is sent."""

    name = "lying-wrong-wire"
    session_class = NativeSession.building(_SaysTokens)


class _NoSuchWire(AllToAllExchange):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, wire="token")  # type: ignore[arg-type]  # the lie


class UnknownClaim(Liar):
    """Claims a value that is none."""

    name = "lying-unknown-claim"
    session_class = NativeSession.building(_NoSuchWire)


class _ClaimsInResolved(AllToAllExchange):
    @property
    def resolved(self) -> Mapping[str, str]:
        return {**super().resolved, "wire": "tokens"}


class ClaimShown(Liar):
    """Writes what it claims into `resolved`, where no check reads claims."""

    name = "lying-claim-shown"
    session_class = NativeSession.building(_ClaimsInResolved)


class _SaysAll(Router):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, wire="all")


class ClaimsDisagree(Liar):
    """The layer's router and its exchange claim two values of one field."""

    name = "lying-claims-disagree"
    session_class = NativeSession.building(_SaysAll, _SaysTokens)


class _CapacityUnsaid(CapacityOnTheWire):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, wire="pairs")


class CapacityUnsaid(Liar):
    """Sends its capacity to every expert, and does not claim it."""

    name = "lying-capacity-unsaid"
    session_class = NativeSession.building(_CapacityUnsaid)


class _AsksTwice(CapacityOnTheWire):
    def _room(self, routing: Routing) -> int | None:
        super()._room(routing)
        return super()._room(routing)


class AsksTwice(Liar):
    """Claims that it sends its capacity, and reduces another number beside it."""

    name = "lying-asks-twice"
    session_class = NativeSession.building(_AsksTwice)


class _WireUnsaid(AllGatherExchange):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, wire="pairs")


class _GathersSession(NativeSession):
    replaced: ClassVar[Mapping[type, type]] = {AllGatherExchange: _WireUnsaid}

    def exchange(self, config: Config) -> ClaimingExchange:
        return super().exchange(replace(config, variant="allgather"))  # type: ignore[return-value]


class WireUnsaid(Liar):
    """Sends all tokens to all ranks, and does not claim it."""

    name = "lying-wire-unsaid"
    session_class = _GathersSession


class _WholeSession(NativeSession):
    expert_output_is_partial = False


class HidesParts(Liar):
    """Claims that every etp shard answers in full; combine adds their answers all the same."""

    name = "lying-hides-parts"
    session_class = _WholeSession


# ---- about what is dropped, and what it weighs ------------------------------------------------------------------


class _SaysSpread(AllToAllExchange):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, non_finite="all")

    def _back(self, rows: Tensor, handle: Any) -> Tensor:
        y = super()._back(rows, handle)
        shift = 0.5 * (~y.detach().isfinite()).any()
        return y + shift


class SaysSpread(Liar):
    """Claims that a value that is not finite reaches other tokens, and moves them by a finite number."""

    name = "lying-says-spread"
    session_class = NativeSession.building(_SaysSpread)


# ---- about the inputs and the output -----------------------------------------------------------------------


class _OutputIntoInput(AllToAllExchange):
    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, handle = super().dispatch(x, routing)
        return delivery, (x, handle)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        x, inner = handle
        y = super().combine(rows, inner)
        x.detach().copy_(y.detach())
        return y


class ChangesInputs(Liar):
    """Leaves y in the memory of x."""

    name = "lying-changes-inputs"
    session_class = NativeSession.building(_OutputIntoInput)


class _OtherDtype(AllToAllExchange):
    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y.float() if y.dtype == torch.float64 else y.double()


class WrongDtype(Liar):
    """Casts y, to float64 or from it."""

    name = "lying-wrong-dtype"
    session_class = NativeSession.building(_OtherDtype)


class _OneHandle(AllToAllExchange):
    kept: Any = None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        delivery, self.kept = super().dispatch(x, routing)
        return delivery, None

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows, self.kept)


class KeepsHandle(Liar):
    """Keeps the state of a step on itself and does not declare that one step may be in flight."""

    name = "lying-keeps-handle"
    session_class = NativeSession.building(_OneHandle)


# ---- about parameters --------------------------------------------------------------------------------------


class _Copies(Experts):
    def named(self, read: Read) -> Iterator[Named]:
        for window in super().named(read):
            yield replace(window, view=window.view.clone())


class CopyingWindows(Liar):
    """Hands out copies for windows: what is written goes nowhere."""

    name = "lying-copying-windows"
    session_class = NativeSession.building(_Copies)


class _NoDown(Experts):
    def named(self, read: Read) -> Iterator[Named]:
        return (window for window in super().named(read) if window.name != "down")


class HidesParameter(Liar):
    """Names no down projection."""

    name = "lying-hides-parameter"
    session_class = NativeSession.building(_NoDown)


# ---- about what was asked for ------------------------------------------------------------------------------


class _DefaultsSession(NativeSession):
    def exchange(self, config: Config) -> SplitExchange:  # type: ignore[override]
        return super().exchange(self._plain(config))  # type: ignore[return-value]

    def experts(self, config: Config) -> Experts:
        return super().experts(self._plain(config))  # type: ignore[return-value]

    def router(self, config: Config) -> Router:
        return super().router(self._plain(config))

    def _plain(self, config: Config) -> Config:
        return Config(config.variant, config.experts, hidden=config.hidden, ffn=config.ffn, dtype=config.dtype)


class IgnoresConfig(Liar):
    """Reads the sizes and the dtype of a config, never calls `only` and takes the default for the rest."""

    name = "lying-ignores-config"
    session_class = _DefaultsSession


class _RefusesLate(AllToAllExchange):
    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        raise Unsupported("not today", by="library")


class RefusesLate(Liar):
    """Builds everything, and refuses in the running step, where a refusal is a failure."""

    name = "lying-refuses-late"
    session_class = NativeSession.building(_RefusesLate)


class WrongGroups(Liar):
    """Says that the expert fold counts ep fastest, then etp; it runs in the groups that it is given."""

    name = "lying-wrong-groups"

    def groups(self, sizes: Mapping[str, int]) -> Mapping[str, RankLists]:
        """Return the lists of ep under the name etp, made for sizes that were swapped, and the reverse."""
        swapped = dict(super().groups({**sizes, "ep": sizes["etp"], "etp": sizes["ep"]}))
        return {**swapped, "ep": swapped["etp"], "etp": swapped["ep"]}
