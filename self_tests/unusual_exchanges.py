"""Exchanges that do what few do and no law forbids: backends with them are to be acquitted."""

# ruff: noqa: D102 - a class says what its methods do otherwise
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange import AllToAllExchange


class WritesIntoAnswers(AllToAllExchange):
    """Combine scales the experts' answers where they lie, and takes that back: no bug."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows.mul_(2), handle) / 2


class LendsUntilTheNext(AllToAllExchange):
    """An output is valid until the next forward, and is overwritten then: no bug where its backward has ended."""

    lent: Tensor | None = None

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        if self.lent is not None:
            self.lent.data.fill_(torch.nan)
        self.lent = super().combine(rows, handle).clone()
        return self.lent


class InPlace(Native):
    """Native, whose exchange writes into answers."""

    session_class = type("InPlaceSession", (NativeSession,), {"alltoall_class": WritesIntoAnswers})


class Lending(Native):
    """Native, whose exchange lends its outputs."""

    session_class = type("LendingSession", (NativeSession,), {"alltoall_class": LendsUntilTheNext})
