"""Backends for searches: native with two bugs at once, with crashes of several kinds, and with refusals."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, LocalExchange
from moe_conformance.contract import Config, Delivery, Routing, refusals
from self_tests.planted_bugs import find


def _with(*bugs: type[AllToAllExchange]) -> type[Native]:
    """Return native with all these bugs in its all-to-all."""
    exchange = type("Several", bugs, {})
    return type("NativeWithSeveral", (Native,), {"session_class": NativeSession.building(exchange)})


def _bug(plant: str) -> type[AllToAllExchange]:
    """Return the class that a planted bug puts in the place of native's."""
    bug: type[AllToAllExchange] = find(plant).native.session_class.replaced[AllToAllExchange]
    return bug


class RaisesAtOneToken(AllToAllExchange):
    """Raises on a rank that has a single token: the last step to the smallest batch of any other bug."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Raise, or dispatch."""
        if len(x) == 1:
            raise RuntimeError("one token")
        return super().dispatch(x, routing)


class RaisesAtTwoTokens(AllToAllExchange):
    """Raises on a rank that has two tokens or more; the same exception, in another line."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """Raise, or dispatch."""
        if len(x) > 1:
            raise RuntimeError("two tokens")
        return super().dispatch(x, routing)


class Dies(LocalExchange):
    """Ends its process, whatever it is given."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        """End."""
        os._exit(3)


class _DyingSession(NativeSession):
    def exchange(self, config: Config) -> Any:
        return Dies(config, self.topology)


def _refuse(refused: bool, words: str) -> None:
    if refused:
        raise ValueError(words)


class _RefusingSession(NativeSession):
    def exchange(self, config: Config) -> Any:
        with refusals(ValueError, match="no float16"):
            _refuse(config.dtype == torch.float16, "no float16")
        return super().exchange(config)


class _RefusingAllSession(NativeSession):
    def exchange(self, config: Config) -> Any:
        with refusals(ValueError, match="nothing here"):
            _refuse(True, "nothing here")
        return super().exchange(config)


class Dying(Native):
    """Native whose ranks die."""

    session_class = _DyingSession


class Refusing(Native):
    """Native that builds nothing in float16."""

    session_class = _RefusingSession
    library_modules = (__name__,)


class RefusingAll(Refusing):
    """Native that builds nothing."""

    session_class = _RefusingAllSession  # type: ignore[assignment]


OutputAndCrash = _with(RaisesAtOneToken, _bug("answers-read-in-token-order"))
TwoCrashes = _with(RaisesAtOneToken, RaisesAtTwoTokens)
