"""Expected losses of a step, and their gradients, under a rule: the claimed one, or that of a mistake.

A part stands for the T tokens of one tp x cp group in one microbatch and one layer, each token once. M microbatches,
dp data parallel groups, K slots, E experts, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.reference.forcing.scores import loss_views
from moe_conformance.reference.losses import balance, over_ranks, scaling
from moe_conformance.reference.losses.z_loss import z_loss, z_loss_of_parts
from moe_conformance.reference.routing.routes import Score, weights

BALANCE = ("auxiliary", "sequence", "global_batch", "first_choice")
NAMES = (*BALANCE, "z")
IS_GLOBAL = "global_batch"
CALLED: Mapping[str, str] = {
    "auxiliary": "the auxiliary loss",
    "sequence": "the sequence loss",
    "global_batch": "the global loss",
    "first_choice": "the loss of first choices",
    "z": "the z-loss",
}


@dataclass(frozen=True, eq=False)
class Part:
    """The tokens of one tp x cp group in one microbatch and one layer."""

    ranks: tuple[int, ...]
    tokens: tuple[int, ...]  # number of tokens of each rank
    logits_TE: Tensor  # float64, as returned by the router
    x_TD: Tensor
    ids_TK: Tensor  # as returned by the router
    upstream_TK: Tensor  # upstream gradient of the routing weights
    padding_T: Tensor | None
    sequences_T: Tensor

    @property
    def valid(self) -> int:
        """The number V of valid tokens, without padding."""
        return len(self.logits_TE) if self.padding_T is None else int((~self.padding_T).sum())

    def of_rank(self, rows: Tensor, number: int) -> Tensor:
        """Return the rows of one of the part's ranks."""
        found: tuple[Tensor, ...] = rows.split(self.tokens)
        return found[number]


Parts = Sequence[Sequence[Part]]  # by microbatch and data parallel group


@dataclass(frozen=True)
class Rule:
    """A rule by which losses are computed: as claimed, as the spec leaves free, or wrong."""

    gathered: Literal["mean", "sum"] = "mean"
    fractions: Literal["slots", "tokens"] = "slots"
    remembers: bool = True
    # Free: counts within the groups of a limited router, or of forced ids; the mean over ranks of their own z-losses; S
    # without padding.
    choices: Literal["own", "limited", "routed"] = "own"
    z: Literal["whole", "of ranks", "of scores"] = "whole"
    sequences: Literal["all", "valid"] = "all"
    # Wrong.
    padding: Literal["left out", "counted", "inverted"] = "left out"
    score: Score | None = None
    raw_scores: bool = False
    ranks_alone: bool = False
    one_sequence: bool = False
    constant: Literal["", "scores"] = ""
    step_alone: bool = False
    z_tokens: int | None = None  # by which every z-loss is divided


@dataclass(frozen=True)
class Steps:
    """The losses of one step of one layer, under a rule."""

    config: Config
    rule: Rule
    parts: Parts
    scale: float  # the factor of the main loss

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the configured losses."""
        return tuple(name for name in NAMES if getattr(self.config.losses, name))

    def coefficient(self, name: str) -> float:
        """Return the coefficient c of a loss."""
        value: float = getattr(self.config.losses, name)
        return value

    @property
    def score(self) -> Score:
        """The score function that the losses use."""
        return self.rule.score or self.config.routing.score

    def padding(self, part: Part) -> Tensor | None:
        """Return the mask of tokens that losses leave out, or None."""
        if part.padding_T is None or self.rule.padding == "counted":
            return None
        return ~part.padding_T if self.rule.padding == "inverted" else part.padding_T

    def valid(self, part: Part) -> int:
        """Return the number of tokens that losses include."""
        padding_T = self.padding(part)
        return len(part.logits_TE) if padding_T is None else int((~padding_T).sum())

    def choices(self, part: Part, name: str) -> Tensor:
        """Return the slots that a loss counts."""
        routing = self.config.routing
        if self.rule.choices == "routed":
            ids_TK = part.ids_TK
        elif routing.forced:  # the choice by forced logits, which the router returns, or by its own
            counted, _ = loss_views(part.logits_TE, top_k=self.config.top_k, forced_logits_TE=part.logits_TE)
            ids_TK = counted.ids_TK
        else:
            ids_TK = balance.choices(
                part.logits_TE.detach(),
                score=self.score,
                top_k=self.config.top_k,
                groups=routing.groups if self.rule.choices == "limited" else None,
                group_score=routing.group_score,
                padding_T=self.padding(part),
            )
        return ids_TK[:, :1] if name == "first_choice" else ids_TK

    def _times(self, name: str) -> float:
        """Return the coefficient c, times K where fractions are of tokens."""
        slots = self.config.top_k if self.rule.fractions == "tokens" and name not in ("z", "first_choice") else 1
        return self.coefficient(name) * slots

    def loss(self, name: str, part: Part) -> Callable[[Tensor], Tensor]:
        """Return the loss of a part as a function of its logits; not for the global loss."""
        c, padding_T = self._times(name), self.padding(part)
        if name == "z":
            return self._z(part)
        if self.rule.ranks_alone and len(part.ranks) > 1:
            return lambda logits_TE: self._of_ranks(name, part, logits_TE)
        ids_TK = self.choices(part, name)
        if name == "sequence" and not self.rule.one_sequence:
            labels = part.sequences_T.unique()
            divisor = len(labels) if self.rule.sequences == "all" else None
            return lambda logits_TE: balance.sequence_loss(
                logits_TE,
                ids_TK,
                part.sequences_T,
                score=self.score,
                coefficient=c,
                padding_T=padding_T,
                divisor=divisor,
            )
        return lambda logits_TE: balance.auxiliary_loss(
            logits_TE, ids_TK, score=self.score, coefficient=c, padding_T=padding_T
        )

    def _z(self, part: Part) -> Callable[[Tensor], Tensor]:
        c, padding_T = self.coefficient("z"), self.padding(part)
        if self.rule.z == "of ranks":
            paddings = [None] * len(part.ranks) if padding_T is None else padding_T.split(part.tokens)
            return lambda logits_TE: z_loss_of_parts(
                logits_TE.split(part.tokens), coefficient=c, padding_by_rank=list(paddings)
            )
        if self.rule.z == "of scores":
            return lambda logits_TE: z_loss(logits_TE.softmax(1), coefficient=c, padding_T=padding_T)
        stale = self.valid(part) / self.rule.z_tokens if self.rule.z_tokens else 1.0
        return lambda logits_TE: stale * z_loss(logits_TE, coefficient=c, padding_T=padding_T)

    def _of_ranks(self, name: str, part: Part, logits_TE: Tensor) -> Tensor:
        """Return the mean of the losses that ranks compute from their own tokens."""
        ids_TK, padding_T = self.choices(part, name), self.padding(part)
        losses = []
        for number, logits_tE in enumerate(logits_TE.split(part.tokens)):
            padding_t = None if padding_T is None else part.of_rank(padding_T, number)
            losses.append(
                balance.auxiliary_loss(
                    logits_tE,
                    part.of_rank(ids_TK, number),
                    score=self.score,
                    coefficient=self._times(name),
                    padding_T=padding_t,
                )
            )
        return torch.stack(losses).mean()

    def global_losses(self, logits: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the global loss of every microbatch, (M,), from logits by microbatch and group."""
        ids = [[self.choices(part, IS_GLOBAL) for part in row] for row in self.parts]
        return over_ranks.global_losses(
            logits,
            ids,
            score=self.score,
            coefficient=self._times(IS_GLOBAL),
            padding=[[self.padding(part) for part in row] for row in self.parts],
            remembers=self.rule.remembers,
        )

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """The losses by name, (M, dp); the global loss (M, 1)."""
        found = {}
        for name in self.names:
            if name == IS_GLOBAL:
                found[name] = self.global_losses([[part.logits_TE for part in row] for row in self.parts])[:, None]
            else:
                rows = [[self.loss(name, part)(part.logits_TE) for part in row] for row in self.parts]
                found[name] = torch.stack([torch.stack(row) for row in rows])
        return found

    @cached_property
    def slopes(self) -> dict[str, list[list[Tensor]]]:
        """The gradients of losses with respect to each part's logits, (T, E), by name, microbatch and group."""
        found: dict[str, list[list[Tensor]]] = {}
        for name in self.names:
            if name == IS_GLOBAL:
                leaves = [[part.logits_TE.detach().clone().requires_grad_() for part in row] for row in self.parts]
                losses_M = self.global_losses(leaves)
                found[name] = [
                    list(
                        torch.autograd.grad(
                            losses_M[m], row, retain_graph=True, materialize_grads=True, allow_unused=True
                        )
                    )
                    for m, row in enumerate(leaves)
                ]
            else:
                found[name] = [[self._slope(name, part) for part in row] for row in self.parts]
        return found

    def _slope(self, name: str, part: Part) -> Tensor:
        """Return the gradient of a loss, attached to routing weights whose upstream gradient is zero."""
        none_TK = torch.zeros_like(part.upstream_TK)
        return scaling.attached_gradient(part.logits_TE, self.weigh(part), none_TK, [self.loss(name, part)])

    def weigh(self, part: Part) -> Callable[[Tensor], Tensor]:
        """Return the routing weights as a function of logits."""
        routing, ids_TK = self.config.routing, part.ids_TK.clamp_min(0)
        return lambda logits_TE: weights(
            logits_TE, ids_TK, score=routing.score, normalise=routing.normalise, scale=routing.scale
        )

    def main_slope(self, part: Part) -> Tensor:
        """Return the gradient of the main loss, through the routing weights, with respect to the logits, (T, E)."""
        if not bool(part.upstream_TK.any()):
            return torch.zeros_like(part.logits_TE)
        if id(part) not in self._main_slopes:
            slope_TE = scaling.attached_gradient(part.logits_TE, self.weigh(part), part.upstream_TK, [])
            self._main_slopes[id(part)] = slope_TE
        return self._main_slopes[id(part)]

    @cached_property
    def _main_slopes(self) -> dict[int, Tensor]:
        """The cache of `main_slope`, by the id() of a part."""
        return {}

    def loss_gradient(self, name: str) -> Tensor:
        """Return the finished gradient of one loss with respect to the router's weight, (E, D)."""
        table = [
            [slope_TE.T @ part.x_TD for slope_TE, part in zip(slopes, row, strict=True)]
            for slopes, row in zip(self.slopes[name], self.parts, strict=True)
        ]
        valid = [[self.valid(part) for part in row] for row in self.parts]
        if name == IS_GLOBAL:
            table, valid = [[torch.stack(row).sum(0)] for row in table], [[sum(row)] for row in valid]
        if self.config.losses.per_token:
            return self.scale * scaling.token_gradient(table, valid)
        if self.rule.gathered == "mean":
            return self.scale * scaling.mean_gradient(table)
        return scaling.sum_gradient(table, scale=self.scale)

    def local_factor(self, name: str, m: int, d: int, main: float) -> float:
        """Return the factor of a loss's gradient in that of the input, before finishing multiplies by `main`."""
        M, dp = len(self.parts), len(self.parts[0])
        if self.config.losses.per_token:
            group = self.parts[m] if name == IS_GLOBAL else [self.parts[m][d]]
            return self.scale * sum(self.valid(part) for part in group)
        of = 1 if self.rule.gathered == "sum" else M if name == IS_GLOBAL else M * dp
        return self.scale / of / main
