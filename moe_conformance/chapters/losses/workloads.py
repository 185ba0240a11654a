"""Scripts of training steps with the losses of routers, alone and together, over microbatches, ranks and padding.

Every data parallel group has B other sequences. A step splits them into microbatches by sequence; the ranks of a tp x
cp group hold consecutive positions. No token has two experts that nearly tie where a selection is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from moe_conformance.contract import Config, Losses
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import ON_TRAINING_ROUTERS
from moe_conformance.workloads.records.training import Mode, RouterBatch
from moe_conformance.workloads.records.workload import Call, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import Profile

_E, _D, _B, _POSITIONS = 8, 16, 4, 4  # positions of each rank
_MARGIN = 1e-2  # between the logits of a counted expert and of one that is not
TP2_CP2, CP2 = Layout(4, tp=2, cp=2), Layout(4, cp=2, ep=2)

Padding = Literal["none", "asymmetric", "ragged", "one rank", "all"]
Tokens = Literal["plain", "hot", "equal", "one choice", "large"]


@dataclass(frozen=True)
class Step:
    """One step: its microbatches, padding, scale of the main loss, and size of upstream gradients."""

    microbatches: int = 1
    padding: Padding = "none"
    scale: float = 1.0
    upstream: float = 0.0
    overlapped: bool = False
    modes: tuple[Mode, ...] = ()  # of further forwards, which do not train


@dataclass(frozen=True)
class Recipe:
    """The losses, steps and options of one script."""

    name: str
    losses: Losses
    steps: tuple[Step, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: Tokens = "plain"
    where: Literal["every layout", "one rank"] = "every layout"
    uneven: bool = False  # data parallel groups have different numbers of positions


_ALL = Losses(auxiliary=0.3, sequence=0.7, global_batch=0.45, z=0.06)
_PADDED = (
    *(Step(2, padding, upstream=0.5) for padding in ("asymmetric", "ragged", "one rank")),
    Step(1, "all"),
    Step(1),
)
_MIXED = (Step(2, "asymmetric", upstream=1.0, overlapped=True), Step(1, "ragged"))
_PLAIN = (Step(1), Step(2, scale=0.5, upstream=1.0))
_DIVIDED = (Step(1), Step(2), Step(4))  # of the same sequences

_RECIPES = (
    Recipe("losses-auxiliary", Losses(auxiliary=0.5), _DIVIDED),
    Recipe("losses-sequence", Losses(sequence=0.5), _DIVIDED),
    Recipe("losses-global", Losses(global_batch=0.5), (*_DIVIDED, Step(2, scale=0.5))),
    Recipe("losses-first-choice", Losses(first_choice=0.5), _PLAIN, {"routing.normalise": True}),  # as GShard's gate
    Recipe("losses-top-1", Losses(auxiliary=0.5), _PLAIN, {"top_k": 1}),
    Recipe("losses-top-3-normalised", Losses(auxiliary=0.5), _PLAIN, {"top_k": 3, "routing.normalise": True}),
    Recipe("losses-z", Losses(z=0.25), _PLAIN),
    Recipe(
        "losses-attached",
        _ALL,
        (
            Step(2, upstream=1.0),
            Step(2),
            Step(2, upstream=2.0, scale=4.0),
            Step(2, upstream=1.0, scale=0.0),
            Step(2, upstream=1.0, overlapped=True),
            Step(1, upstream=1.0, modes=("evaluation",)),
        ),
    ),
    Recipe("losses-padding", _ALL, _PADDED),
    Recipe("losses-padding-z", Losses(z=0.25), _PADDED),
    Recipe("losses-padding-top-1", Losses(auxiliary=0.5), _PADDED, {"top_k": 1}, where="one rank"),
    Recipe("losses-uneven", _ALL, _MIXED, uneven=True),
    Recipe("losses-with-first-choice", Losses(auxiliary=0.3, first_choice=0.7, z=0.06), _PLAIN, where="one rank"),
    Recipe("losses-per-token", replace(_ALL, per_token=True), (*_PLAIN, *_PADDED)),
    Recipe("losses-per-token-auxiliary", Losses(auxiliary=0.5, per_token=True), _PLAIN),
    Recipe("losses-per-token-sequence", Losses(sequence=0.5, per_token=True), _DIVIDED),
    Recipe("losses-recomputed", replace(_ALL, recompute=True), _MIXED),
    # Of losses that no ragged sequence and no group changes.
    Recipe(
        "losses-recomputed-auxiliary",
        Losses(auxiliary=0.3, z=0.06, recompute=True),
        (Step(2, "asymmetric", upstream=1.0, overlapped=True), Step(1, upstream=1.0)),
    ),
    Recipe(
        "losses-evaluation",
        _ALL,
        (
            Step(2, upstream=1.0),
            Step(0, modes=("evaluation", "no_grad", "evaluation")),
            Step(2, upstream=1.0, modes=("no_grad", "evaluation")),
            Step(2, upstream=1.0),
        ),
    ),
    Recipe("losses-layers", replace(_ALL, layers=2, dense_layers=1), (Step(2, upstream=1.0), Step(1))),
    Recipe("losses-layers-top-1", Losses(auxiliary=0.5, layers=2), _PLAIN, {"top_k": 1}, where="one rank"),
    Recipe("losses-sigmoid", Losses(auxiliary=0.5), _PLAIN, {"routing.score": "sigmoid", "routing.normalise": True}),
    Recipe("losses-sigmoid-one", Losses(auxiliary=0.5), _PLAIN, {"routing.score": "sigmoid", "top_k": 1}),
    Recipe("losses-sqrtsoftplus", Losses(auxiliary=0.5), _PLAIN, {"routing.score": "sqrtsoftplus"}, where="one rank"),
    Recipe("losses-softmax-topk", Losses(auxiliary=0.5), _PLAIN, {"routing.score": "softmax_topk"}, where="one rank"),
    Recipe("losses-three-choices", _ALL, _PLAIN, {"top_k": 3}, where="one rank"),
    Recipe(
        "losses-biased",
        _ALL,
        _PLAIN,
        {"routing.score": "sigmoid", "routing.balance_bias": True, "routing.normalise": True, "routing.scale": 2.5},
        where="one rank",
    ),
    Recipe(
        "losses-groups",
        _ALL,
        _PLAIN,
        {"routing.groups": (4, 2), "routing.group_score": "max"},
        where="one rank",
    ),
    Recipe("losses-forced-random", _ALL, _PLAIN, {"routing.forced": (("random", None),)}, where="one rank"),
    Recipe("losses-forced-round-robin", _ALL, _PLAIN, {"routing.forced": (("round_robin", None),)}, where="one rank"),
    Recipe("losses-dropped", Losses(auxiliary=0.5), _PLAIN, {"capacity.factor": 0.5}, "hot", where="one rank"),
    # Without upstream gradients: where experts are filled up, a token may have slots that it did not select.
    Recipe(
        "losses-dropped-sequence",
        Losses(sequence=0.5),
        _DIVIDED[:2],
        {"capacity.factor": 0.5, "capacity.padded": True},
        "hot",
        where="one rank",
    ),
    Recipe("losses-equal", _ALL, (Step(1),), tokens="equal", where="one rank"),
    Recipe("losses-one-choice", _ALL, (Step(1),), tokens="one choice", where="one rank"),
    Recipe("losses-large", replace(_ALL, z=0.0), (Step(1),), tokens="large", where="one rank"),
    Recipe(
        "losses-large-sigmoid",
        replace(_ALL, z=0.0),
        (Step(1),),
        {"routing.score": "sigmoid", "routing.normalise": True},
        tokens="large",
        where="one rank",
    ),
    Recipe("losses-bfloat16", _ALL, (Step(1),), {"dtype": torch.bfloat16}, tokens="hot", where="one rank"),
    Recipe(
        "losses-bfloat16-sigmoid",
        Losses(auxiliary=0.5),
        (Step(1),),
        {"dtype": torch.bfloat16, "routing.score": "sigmoid", "routing.normalise": True},
        tokens="hot",
        where="one rank",
    ),
    Recipe("losses-float16", _ALL, (Step(1),), {"dtype": torch.float16}, tokens="hot", where="one rank"),
)
# On more ranks other scripts cover the same.
_ON_MORE_RANKS_IN_FULL = tuple(
    f"losses-{name}"
    for name in ("first-choice", "sigmoid", "sigmoid-one", "padding-z", "per-token-sequence", "evaluation")
)
NAMES = tuple(recipe.name for recipe in _RECIPES)
QUICK = (SINGLE, EP2, TP2_EP2, TP2_CP2, CP2)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts on layouts with one pipeline stage; those about single tokens on one rank only."""
    if layout.pp > 1 or layout.etp > 1:
        return
    for recipe in _RECIPES:
        if profile == "quick" and layout != SINGLE and recipe.name in _ON_MORE_RANKS_IN_FULL:
            continue
        if layout == SINGLE or recipe.where == "every layout":
            base = Config(variant=variant, experts=_E, hidden=_D, losses=recipe.losses)
            yield script(recipe, base.changed(recipe.options), layout)


def script(recipe: Recipe, config: Config, layout: Layout) -> Workload:
    """Return the script of a recipe, given the options of its routers."""
    E, D = config.experts, config.hidden
    g = draw.generator(recipe.name)
    parameters: dict[ParameterKey, Tensor] = {}
    for layer in range(config.losses.layers):
        router_ED = torch.randn(E, D, generator=g).to(config.dtype)
        parameters["router", layer] = router_ED
        if config.routing.balance_bias:
            parameters["balance_bias", layer] = torch.linspace(-0.5, 0.5, E)[torch.randperm(E, generator=g)]
    tokens = _Drawn(recipe, config, layout, [parameters["router", layer] for layer in range(config.losses.layers)])
    calls = tuple(map(tokens.call, recipe.steps))
    return Workload(recipe.name, ON_TRAINING_ROUTERS, config, layout, (), parameters=parameters, calls=calls)


@dataclass(frozen=True)
class _Drawn:
    """Draws the tokens of all ranks, and the calls of steps."""

    recipe: Recipe
    config: Config
    layout: Layout
    routers: list[Tensor]

    @property
    def together(self) -> int:
        """The number of ranks that process a microbatch together."""
        return self.layout.tp * self.layout.cp

    def positions(self, group: int) -> int:
        """Return the number of positions of a rank of a data parallel group."""
        return _POSITIONS + (group if self.recipe.uneven else 0)

    @cached_property
    def x(self) -> list[list[Tensor]]:
        """The tokens by data parallel group and layer, (S, B, D)."""
        return [
            [
                _tokens(
                    self.recipe.tokens,
                    router_ED,
                    self.config,
                    self.positions(group) * self.together,
                    f"{self.recipe.name} {layer} {group}",
                )
                for layer, router_ED in enumerate(self.routers)
            ]
            for group in range(self.layout.dp)
        ]

    def call(self, step: Step) -> Call:
        """Return the call of one step.

        All steps have the same tokens; steps with the same number of microbatches have the same upstream gradients.
        """
        return Call("step", tuple(self._given(step, rank) for rank in range(self.layout.world)))

    def _given(self, step: Step, rank: int) -> dict[str, Any]:
        group, place = divmod(rank, self.together)
        positions, x = self.positions(group), self.x[group]
        padding_SB = _padding(step.padding, positions * self.together, positions, group)
        mine = slice(place * positions, (place + 1) * positions)
        g = draw.generator("upstream", self.recipe.name, rank)
        width = _B // max(1, step.microbatches)
        batches = []
        for m in range(step.microbatches):
            columns = slice(m * width, (m + 1) * width)
            here = None if step.padding == "none" else padding_SB[mine, columns].flatten()
            upstream = tuple(
                step.upstream * torch.randn(positions * width, self.config.experts, generator=g) for _ in self.routers
            )
            batches.append(RouterBatch(tuple(x_SBD[mine, columns].contiguous() for x_SBD in x), upstream, here))
        others = [
            RouterBatch(tuple(x_SBD[mine].roll(n, 0).contiguous() for x_SBD in x), (), None, mode)
            for n, mode in enumerate(step.modes)
        ]
        # Forwards that do not train come before, between and after those that do.
        ordered = [*others[:1], *batches[:1], *others[1:], *batches[1:]]
        tp_first = place - place % self.layout.tp
        of_tp = padding_SB[tp_first * positions : (tp_first + self.layout.tp) * positions]
        valid = int((~of_tp).sum()) if step.microbatches else 0
        return {
            "batches": tuple(ordered),
            "scale": step.scale,
            "tokens": valid,
            "overlapped": step.overlapped,
        }


def _padding(padding: Padding, positions: int, of_rank: int, group: int) -> Tensor:
    """Return which tokens of a data parallel group are padding, bool (S, B)."""
    padding_SB = torch.zeros(positions, _B, dtype=torch.bool)
    if padding == "all":
        padding_SB[:] = True
    if padding == "asymmetric":  # at the end of every sequence: a third in the first group, less in others
        padding_SB[positions - max(1, positions // (3 + 2 * group)) :] = True
    if padding == "ragged":
        for column in range(_B):
            padding_SB[positions - (column + group) % (positions - 1) :, column] = True
    if padding == "one rank" and group == 0:
        padding_SB[:of_rank] = True
        if positions == of_rank:  # there is one rank: leave one token of each sequence
            padding_SB[-1] = False
    return padding_SB


def _tokens(tokens: Tokens, router_ED: Tensor, config: Config, positions: int, seed: str) -> Tensor:
    """Return x (S, B, D) whose selections of experts do not depend on rounding."""
    g = draw.generator("tokens", seed)
    shape = (positions, _B, config.hidden)
    if tokens == "equal":
        return torch.zeros(shape, dtype=config.dtype)
    x: Tensor = torch.randn(shape, generator=g) * config.hidden**-0.5
    if tokens == "one choice":
        x = x[:1, :1].expand(shape).clone()
    if tokens == "hot":  # most tokens have the same first choice
        x = x + router_ED[0].float() * 0.25
    if tokens == "large":
        x = x * 60
    x = x.to(config.dtype)
    for _ in range(200):
        close = _close(x.double() @ router_ED.double().T, config)
        if not bool(close.any()):
            return x
        x[close] = (x[close].float() + 0.1 * torch.randn(x[close].shape, generator=g)).to(config.dtype)
    raise ValueError(f"no tokens without near ties for {seed}")


def _close(logits: Tensor, config: Config) -> Tensor:
    """Return which tokens have experts that nearly tie for the first or the last of K slots."""
    best = logits.sort(dim=-1, descending=True).values
    gaps = best[..., :-1] - best[..., 1:]
    margin = _MARGIN if config.dtype == torch.float32 else 32 * _MARGIN
    return (gaps[..., [0, config.top_k - 1]] < margin).any(-1)


CHAPTERS = (Chapter((ON_TRAINING_ROUTERS,), NAMES, scripts, quick=QUICK),)
