"""Backends whose routers claim what they do not do, or do not claim what they do."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_conformance.backends.native import NativeSession
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Claims
from self_tests.correct_backends.unusual import (
    FirstChoicesFirst,
    NoisyInTraining,
    NormalisesOverTheKept,
    RanksByScore,
    RoundsCapacitiesDown,
)
from self_tests.lying_backends.lying import Liar


class _ChoicesUnsaid(FirstChoicesFirst):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, drop_order="tokens")


class ChoicesUnsaid(Liar):
    """Keeps the first choices of all tokens before any second choice, and does not claim it."""

    name = "lying-choices-unsaid"
    session_class = NativeSession.building(_ChoicesUnsaid)


class _ScoresUnsaid(RanksByScore):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, drop_by="weights")


class ScoresUnsaid(Liar):
    """Keeps the slots of the highest scores, and does not claim it."""

    name = "lying-scores-unsaid"
    session_class = NativeSession.building(_ScoresUnsaid)


class _SaysScores(Router):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, drop_by="scores")


class SaysScores(Liar):
    """Claims that it keeps the slots of the highest scores; those of the highest weights are kept."""

    name = "lying-says-scores"
    session_class = NativeSession.building(_SaysScores)


class _DownUnsaid(RoundsCapacitiesDown):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, capacity_rounding="up")


class DownUnsaid(Liar):
    """Rounds capacities down, and does not claim it."""

    name = "lying-down-unsaid"
    session_class = NativeSession.building(_DownUnsaid)


class _SaysDown(Router):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, capacity_rounding="down")


class SaysDown(Liar):
    """Claims that capacities are rounded down; they are rounded up."""

    name = "lying-says-down"
    session_class = NativeSession.building(_SaysDown)


class _KeptUnsaid(NormalisesOverTheKept):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, normalised_over="selected")


class KeptUnsaid(Liar):
    """Normalises weights over the kept slots, and does not claim it."""

    name = "lying-kept-unsaid"
    session_class = NativeSession.building(_KeptUnsaid)


class _NoiseUnsaid(NoisyInTraining):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, noise="no")


class NoiseUnsaid(Liar):
    """Adds noise to its logits, and does not claim it."""

    name = "lying-noise-unsaid"
    session_class = NativeSession.building(_NoiseUnsaid)


class _AlwaysNoisy(NoisyInTraining):
    def train(self, mode: bool = True) -> _AlwaysNoisy:
        return self


class AlwaysNoisy(Liar):
    """Claims that it adds noise in training only, and adds it in evaluation too."""

    name = "lying-always-noisy"
    session_class = NativeSession.building(_AlwaysNoisy)


class _SaysFloat32(Router):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, dtype=torch.float32)


class SaysFloat32(Liar):
    """Claims that its routers compute in float32 whatever the tokens are; they compute in float64 where tokens do."""

    name = "lying-says-float32"
    session_class = NativeSession.building(_SaysFloat32)


class _SaysKept(Router):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, normalised_over="kept")


class SaysKept(Liar):
    """Claims that weights are normalised over the kept slots; they are over the selected ones."""

    name = "lying-says-kept"
    session_class = NativeSession.building(_SaysKept)


class _SaysChoices(Router):
    @property
    def claims(self) -> Claims:
        return replace(super().claims, drop_order="choices")


class SaysChoices(Liar):
    """Claims that first choices stay first; the slots of the first tokens do."""

    name = "lying-says-choices"
    session_class = NativeSession.building(_SaysChoices)
