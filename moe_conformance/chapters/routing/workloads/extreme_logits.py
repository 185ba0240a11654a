"""The pinned workloads of routers with logits that are very large, very small, -inf, NaN or infinite.

The router's weight is a diagonal of plus and minus one, so that an entry of a token is a logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import RouterStep
from moe_conformance.workloads.records.workload import Batch, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import Profile

HUGE = 1e30
_PLACES = (0, 3)  # the tokens of a rank that are spoilt


@dataclass(frozen=True)
class ExtremeRecipe:
    """The options of one workload: finite logits of any size, experts masked by -inf, or NaN or inf in tokens."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (18, 9)  # rank r has the entry r modulo the length
    masked: tuple[int, ...] = ()  # experts whose logits are -inf
    spoilt: float | None = None  # the value of one entry of every spoilt token


_SIGMOID = {"routing.score": "sigmoid", "routing.normalise": True, "routing.scale": 2.5}
_ROOT = {"routing.score": "sqrtsoftplus", "routing.normalise": True}
_CHOSEN = {"routing.score": "softmax_topk"}
_GROUPS = {
    "routing.score": "sigmoid",
    "routing.normalise": True,
    "routing.balance_bias": True,
    "routing.groups": (4, 2),
    "top_k": 2,
}

EXTREMES = (
    ExtremeRecipe("extreme-softmax", {"routing.normalise": True}),
    ExtremeRecipe("extreme-softmax-of-chosen", _CHOSEN),
    ExtremeRecipe("extreme-sigmoid", _SIGMOID),
    ExtremeRecipe("extreme-sqrtsoftplus", _ROOT),
    ExtremeRecipe("extreme-groups", _GROUPS),
    ExtremeRecipe("extreme-top-all", {"top_k": 8, "routing.normalise": True}, (1, 5)),
    ExtremeRecipe("extreme-bfloat16", {**_SIGMOID, "dtype": torch.bfloat16}),
    ExtremeRecipe("masked-softmax", {"routing.normalise": True}, masked=(0, 5)),
    ExtremeRecipe("masked-softmax-of-chosen", _CHOSEN, masked=(0, 5)),
    ExtremeRecipe("masked-sigmoid", _SIGMOID, masked=(0, 5)),
    ExtremeRecipe("masked-all-but-one", {**_SIGMOID, "top_k": 3}, masked=(0, 1, 2, 3, 4, 6, 7)),
    ExtremeRecipe("spoilt-nan-softmax", {"routing.normalise": True}, spoilt=torch.nan),
    ExtremeRecipe("spoilt-nan-softmax-of-chosen", _CHOSEN, spoilt=torch.nan),
    ExtremeRecipe("spoilt-nan-sigmoid", _SIGMOID, spoilt=torch.nan),
    ExtremeRecipe("spoilt-nan-groups", _GROUPS, spoilt=torch.nan),
    ExtremeRecipe("spoilt-inf-softmax", {"routing.normalise": True}, spoilt=torch.inf),
    ExtremeRecipe("spoilt-inf-sigmoid", _SIGMOID, spoilt=torch.inf),
)


def names() -> tuple[str, ...]:
    """Return the names of the workloads."""
    return tuple(recipe.name for recipe in EXTREMES)


def extremes(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads, which do not depend on the variant.

    Spoilt tokens are in microbatch 1; microbatches 0 and 2 have only its other tokens. There is no backward if a logit
    is not finite, since the gradient of the matrix product before it is NaN in any router.
    """
    for recipe in EXTREMES:
        config = Config(variant=variant).changed(recipe.config)
        ranks = range(layout.world)
        given = tuple(_batch(recipe, config, layout, rank) for rank in ranks)
        batches: tuple[tuple[Batch, ...], ...] = (given,)
        schedule = "F0" if recipe.masked else "F0 B0"
        if recipe.spoilt is not None:
            rest = tuple(map(_rest, given))
            batches = (rest, tuple(_spoil(batch, recipe.spoilt) for batch in given), rest)
            schedule = "F0 F1 F2"
        parameters = _parameters(config, recipe.masked, draw.generator(recipe.name, layout.name, "router"))
        yield Workload(recipe.name, RouterStep(logits="extreme"), config, layout, batches, schedule, parameters)


def _parameters(config: Config, masked: tuple[int, ...], generator: torch.Generator) -> dict[ParameterKey, Tensor]:
    """Return a router in which the logit of expert e is the token's entry e, negated if e is odd.

    If experts are masked, the logits of all others are below zero, so that a mask that counts as zero is detected.
    """
    made = draw.router_parameters(config, generator, bias=0.3, twins=False)
    signs_E = torch.tensor([-1.0 if masked else 1.0, -1.0]).repeat(config.experts)[: config.experts]
    router_ED = torch.zeros_like(made["router", None])
    router_ED[:, : config.experts] = torch.diag(signs_E)
    router_ED[list(masked)] = -torch.inf
    return {**made, ("router", None): router_ED}


def _batch(recipe: ExtremeRecipe, config: Config, layout: Layout, rank: int) -> Batch:
    """Return tokens that go through `_MANNERS` in turn; if experts are masked, every entry is above zero."""
    generator = draw.generator(recipe.name, layout.name, rank)
    tokens = recipe.tokens[rank % len(recipe.tokens)]
    batch = draw.route_batch(tokens, config, generator, 1.0)
    x_TD = batch.x_TD.abs() if recipe.masked else batch.x_TD
    if not recipe.masked and recipe.spoilt is None:
        for t in range(tokens):
            x_TD[t] = _MANNERS[(t + rank) % len(_MANNERS)](x_TD[t])
    return Batch(x_TD, batch.ids_TK, batch.weights_TK, batch.upstream)


def _alternating(x_D: Tensor, size: float) -> Tensor:
    return size * torch.tensor([1.0, -1.0]).repeat(len(x_D))[: len(x_D)].to(x_D)


_MANNERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x_D: x_D,
    lambda x_D: torch.zeros_like(x_D),  # all logits equal
    lambda x_D: _alternating(x_D, HUGE),  # all logits equal, and huge
    lambda x_D: _alternating(x_D, -HUGE),
    lambda x_D: torch.full_like(x_D, HUGE),  # half of the logits huge, half of them huge and negative
    lambda x_D: x_D.sign() * HUGE,
    lambda x_D: _alternating(x_D, -200.0),  # all scores underflow, except those of a softmax
    lambda x_D: x_D * 100,
    lambda x_D: x_D * 1e-30,
)


def _spoil(batch: Batch, value: float) -> Batch:
    x_TD = batch.x_TD.clone()
    for t in _PLACES:
        x_TD[t, t + 1] = value
    return Batch(x_TD, batch.ids_TK, batch.weights_TK, batch.upstream)


def _rest(batch: Batch) -> Batch:
    kept = [t for t in range(len(batch.x_TD)) if t not in _PLACES]
    return Batch(batch.x_TD[kept], batch.ids_TK[kept], batch.weights_TK[kept], batch.upstream[kept])


CHAPTERS = (Chapter((RouterStep(logits="extreme"),), names(), extremes, quick=(SINGLE, EP2)),)
