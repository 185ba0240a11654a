"""The pinned workloads of routers with forced routing.

With expert groups all tokens prefer the same groups. If all routes go to these, the routing was not forced, or the
groups were limited after it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.records import draw, schedule
from moe_conformance.workloads.records.runs import RouterStep
from moe_conformance.workloads.records.workload import Batch, ParameterKey, Twist, Workload
from moe_conformance.workloads.selection.profiles import Profile
from moe_conformance.workloads.twins import Twin, twin, twin_with

FORCING_LOGITS = ("random", "biased")
ALONE = 1e6  # a deviation of the bias at which logits do not matter
_LIKED = 2.0  # added to the logits of preferred groups, subtracted from all others


@dataclass(frozen=True)
class ForcingRecipe:
    """The name and options of one workload of a router with forced routing."""

    name: str
    strategy: str
    parameter: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (26, 15, 22, 19)  # rank r has the entry r + m modulo the length in microbatch m
    schedule: str = "F0 B0"
    forced: Literal["routes", "draws", "masked", "spread"] = "routes"
    again: bool = False  # every microbatch has the tokens of the first
    copies: bool = False  # the ranks of a tp group hold the same tokens
    routers: int = 1  # that run in turn, as those of several layers
    scale: float = 1.0  # factor on the router's weights, on which forced logits do not depend
    beside: tuple[ForcingRecipe, ...] = ()  # other routers that route before every forward of this one


_SOFTMAX = {"experts": 24, "top_k": 4, "routing.groups": (4, 2), "routing.scale": 2.5}
_SIGMOID = {**_SOFTMAX, "routing.score": "sigmoid", "routing.normalise": True}
_BIASED = {**_SIGMOID, "routing.balance_bias": True}
_ONE = {**_BIASED, "routing.groups": (4, 1), "routing.group_score": "top2_sum"}
_FINE = {**_SOFTMAX, "routing.groups": (8, 2)}
_ONE_WITHOUT = (14, 0, 18, 9)
_MASKED = {"experts": 8, "top_k": 4, "routing.normalise": True}
_MANY = {"experts": 256, "top_k": 8}
_ALONE = {**_MANY, "routing.score": "softmax_topk"}  # with a logit of a million one expert has all the weight
_ALL = {**_SIGMOID, "routing.groups": (4, 4), "routing.group_score": "max"}
_LOUD = 4e38  # in float32 some of the router's logits are infinite, and the others absorb any addend
_NINE = (9,)  # 36 slots for 24 experts: 12 experts have one more than the others on every rank

FORCINGS = (
    ForcingRecipe("forced-random-groups", "random", config=_SIGMOID),
    ForcingRecipe("forced-random-groups-softmax", "random", config=_SOFTMAX, schedule="F0 F1 B0 B1"),
    ForcingRecipe("forced-random-groups-biased", "random", config=_BIASED),
    ForcingRecipe("forced-random-all-groups", "random", config=_ALL),
    ForcingRecipe("forced-biased-groups", "biased", 0.5, _BIASED, schedule="F0 F1 B1 B0"),
    ForcingRecipe("forced-kept-bias-groups", "biased", -2.0, _SOFTMAX, schedule="F0 F1 B1 B0"),
    ForcingRecipe("forced-round-robin-groups", "round_robin", config=_SOFTMAX),
    ForcingRecipe("forced-round-robin-one-group", "round_robin", config=_ONE, schedule="F0 F1 B0 B1"),
    ForcingRecipe("forced-round-robin-small-groups", "round_robin", config=_FINE, tokens=_NINE),
    ForcingRecipe("forced-random-rank-without-tokens", "random", config=_SIGMOID, tokens=_ONE_WITHOUT),
    ForcingRecipe("forced-round-robin-rank-without-tokens", "round_robin", config=_SIGMOID, tokens=_ONE_WITHOUT),
)

_TWICE, _EACH_TWICE = "F0 F1", "F0 F1 F2 F3"
_SIXTEEN = " ".join(f"F{m}" for m in range(16))
_DRAWN: Literal["draws"] = "draws"
DRAWS = (
    ForcingRecipe("forced-random", "random", tokens=(320,), schedule=_TWICE, forced=_DRAWN, again=True),
    ForcingRecipe("forced-bias", "biased", 0.5, _MANY, (40, 32), _EACH_TWICE, _DRAWN),
    ForcingRecipe("forced-kept-bias", "biased", -3.0, {**_MANY, "experts": 1024}, (40, 32), "F0", _DRAWN),
    ForcingRecipe(
        "forced-bias-alone", "biased", 1e6, _ALONE, (0, 9, 7, 5), _EACH_TWICE, _DRAWN, routers=2, scale=_LOUD
    ),
    ForcingRecipe("forced-kept-bias-alone", "biased", -1e6, _ALONE, (0, 9, 7, 5), _EACH_TWICE, _DRAWN, routers=2),
    # The same without a rank without tokens, on which a router may raise whatever is forced.
    ForcingRecipe("forced-bias-alone-all-ranks", "biased", 1e6, _ALONE, (3, 9, 7, 5), _EACH_TWICE, _DRAWN, routers=2),
    ForcingRecipe(
        "forced-kept-bias-alone-all-ranks", "biased", -1e6, _ALONE, (3, 9, 7, 5), _EACH_TWICE, _DRAWN, routers=2
    ),
)
# A kept bias that is stored by some properties of the router only would be that of one of these.
_OTHERS = (
    ForcingRecipe("other-deviation", "biased", -0.25, _ALONE, (4,), "F0", _DRAWN),
    ForcingRecipe("other-experts", "biased", -3.0, {}, (4,), "F0", _DRAWN),
    ForcingRecipe("other-dtype", "biased", -1.0, {**_ALONE, "dtype": torch.float64}, (4,), "F0", _DRAWN),
)
# fmt: off
BESIDE = (
    ForcingRecipe("forced-kept-bias-beside", "biased", -3.0, _MANY, (40, 32), "F0", _DRAWN, beside=_OTHERS),
    ForcingRecipe(
        "forced-kept-bias-alone-beside", "biased", -1e6, _ALONE, (5, 9), _TWICE, _DRAWN, routers=2, beside=_OTHERS
    ),
    # Without other sizes, on which a router that takes another's bias raises.
    ForcingRecipe(
        "forced-kept-bias-beside-equal-sizes", "biased", -1e6, _ALONE, (5, 9), _TWICE, _DRAWN, routers=2,
        beside=(_OTHERS[0], _OTHERS[2]),
    ),
)
# fmt: on
SPREAD = ForcingRecipe(
    "forced-bias-spread", "biased", 0.0, {"experts": 64, "top_k": 8}, (512,), _SIXTEEN, "spread", again=True
)
# Strategies that force ids, logits, and ids that depend on the ranks of the exchange group.
_BESIDE = ("round_robin", "random", "worst_rank")
COPIES = (
    ForcingRecipe(
        "forced-random-copies", "random", None, {}, (48,), _TWICE, _DRAWN, again=True, copies=True, scale=_LOUD
    ),
    # Numbers of tokens that E does not divide, so that the first expert of every rank shows.
    ForcingRecipe("forced-round-robin-copies", "round_robin", None, {}, (13, 10, 11), _TWICE, _DRAWN, copies=True),
)
MASKED = tuple(
    ForcingRecipe(f"forced-masked-{name}", "round_robin", None, {**_MASKED, **config}, (10, 7), "F0", "masked")
    for name, config in {
        "softmax": {},
        "softmax-of-chosen": {"routing.score": "softmax_topk", "routing.normalise": False},
        "sigmoid": {"routing.score": "sigmoid", "routing.scale": 2.5},
    }.items()
)
_NOBODY = (0, 1, 2, 3, 5)  # experts with logits of -inf: all the experts of some tokens, and one of the others


def names() -> tuple[str, ...]:
    """Return the names of the workloads, except copies and spread."""
    return tuple(recipe.name for recipe in (*FORCINGS, *DRAWS, *BESIDE, *MASKED))


def forcings(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads, except copies and spread; they do not depend on the variant."""
    yield from (forcing_workload(recipe, variant, layout) for recipe in (*FORCINGS, *DRAWS, *BESIDE, *MASKED))


def spread(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the router that is compared with runs with larger biases."""
    yield forcing_workload(SPREAD, variant, layout)


def copies(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads in which all tp ranks hold the same tokens, on layouts with tp > 1."""
    if layout.tp > 1:
        yield from (forcing_workload(recipe, variant, layout) for recipe in COPIES)


def forcing_workload(recipe: ForcingRecipe, variant: str, layout: Layout) -> Workload:
    """Return the workload of a recipe."""
    forced = ((recipe.strategy, recipe.parameter),)
    how = {"variant": variant, "routing.forced": forced, "token_copies": recipe.copies, **recipe.config}
    config = Config().changed(how)
    microbatches = schedule.microbatches(recipe.schedule)
    tensor = {rank: ranks[0] for ranks in layout.groups()["tp"] for rank in ranks}
    batches = tuple(
        tuple(
            _batch(recipe, config, layout, m, tensor[rank] if recipe.copies else rank) for rank in range(layout.world)
        )
        for m in range(1 if recipe.again else microbatches)
    )
    batches *= microbatches if recipe.again else 1
    parameters = _parameters(config, draw.generator(recipe.name, layout.name, "router"))
    largest = torch.finfo(config.dtype).max  # logits may overflow, the weights may not
    weights_ED = parameters["router", None].double() * recipe.scale
    parameters["router", None] = weights_ED.clamp(-largest, largest).to(config.dtype)
    if recipe.forced == "masked":
        parameters = _masked(config, parameters)
    return Workload(
        recipe.name,
        RouterStep(forced=recipe.forced),
        config,
        layout,
        batches,
        recipe.schedule,
        parameters,
        routers=recipe.routers,
        twist=Twist(beside=tuple(forcing_workload(other, variant, layout) for other in recipe.beside)),
    )


def beside_forced(workload: Workload) -> list[Twin]:
    """Return twins in which another router of the same sizes, with forced routing, routes before the router."""
    sizes = {"experts": workload.config.experts, "top_k": workload.config.top_k}
    recipes = [ForcingRecipe(strategy, strategy, None, sizes, (4, 3), "F0") for strategy in _BESIDE]
    others = [forcing_workload(recipe, workload.config.variant, workload.layout) for recipe in recipes]
    how = "beside a router forced by {}"
    return [twin(workload, how.format(other.name), bits=True, twist=Twist(beside=(other,))) for other in others]


def with_deviations(workload: Workload) -> list[Twin]:
    """Return twins with biases of larger deviations."""
    return [
        twin_with(workload, f"with a bias of deviation {deviation:g}", **{"routing.forced": (("biased", deviation),)})
        for deviation in (0.5, 2.0)
    ]


def liked_groups(config: Config) -> tuple[int, ...]:
    """Return the groups that all tokens prefer, as many as are selected; none without groups."""
    return () if config.routing.groups is None else tuple(range(1, 1 + config.routing.groups[1]))


def forces_logits(workload: Workload) -> bool:
    """Return whether the strategy replaces logits, and not ids."""
    return workload.config.routing.forced[0][0] in FORCING_LOGITS


def forces_ids(workload: Workload) -> bool:
    """Return whether the strategy replaces ids, and not logits."""
    return not forces_logits(workload)


def holds_copies(workload: Workload) -> bool:
    """Return whether the ranks of a tp group hold the same tokens."""
    return workload.config.token_copies


def several_sources(workload: Workload) -> bool:
    """Return whether ids are forced on several ranks of an exchange group that have different tokens."""
    return forces_ids(workload) and not holds_copies(workload) and workload.layout.ep * workload.layout.etp > 1


def draws_at_random(workload: Workload) -> bool:
    """Return whether the strategy draws logits without a bias."""
    return workload.config.routing.forced[0][0] == "random"


def biased(workload: Workload) -> bool:
    """Return whether the strategy draws a bias of each expert."""
    return workload.config.routing.forced[0][0] == "biased"


def beside_others(workload: Workload) -> bool:
    """Return whether other routers with a kept bias run too."""
    return bool(workload.twist.beside)


def bias_decides_alone(workload: Workload) -> bool:
    """Return whether the bias is so large that it alone decides the selection."""
    return biased(workload) and abs(workload.config.routing.forced[0][1] or 0.0) >= ALONE


def _parameters(config: Config, generator: Any) -> dict[ParameterKey, Tensor]:
    """Return a router that prefers `liked_groups`, by a first column that meets an entry of 1 in every token."""
    made = draw.router_parameters(config, generator, bias=0.3, twins=False)
    if config.routing.groups is None:
        return made
    groups, chosen = config.routing.groups
    if groups == chosen:
        return made
    size = config.experts // groups
    router_ED = made["router", None].clone()
    router_ED[:, 0] = -_LIKED
    for group in liked_groups(config):
        router_ED[group * size : (group + 1) * size, 0] = _LIKED
    return {**made, ("router", None): router_ED}


def _masked(config: Config, parameters: dict[ParameterKey, Tensor]) -> dict[ParameterKey, Tensor]:
    """Return a router in which the logit of expert e is the token's entry e, above zero, or -inf."""
    router_ED = torch.zeros_like(parameters["router", None])
    router_ED[:, : config.experts] = torch.eye(config.experts)
    router_ED[list(_NOBODY)] = -torch.inf
    return {**parameters, ("router", None): router_ED}


def _batch(recipe: ForcingRecipe, config: Config, layout: Layout, microbatch: int, rank: int) -> Batch:
    tokens = recipe.tokens[(rank + microbatch) % len(recipe.tokens)]
    batch = draw.route_batch(tokens, config, draw.generator(recipe.name, layout.name, microbatch, rank), 1.0)
    x_TD = batch.x_TD.clone()
    x_TD[:, 0] = 1.0
    return replace(batch, x_TD=x_TD.abs() if recipe.forced == "masked" else x_TD)


CHAPTERS = (
    Chapter(
        (RouterStep(forced="routes"), RouterStep(forced="draws"), RouterStep(forced="masked")),
        names(),
        forcings,
        quick=(SINGLE, EP2),
    ),
    Chapter((RouterStep(forced="draws"),), tuple(recipe.name for recipe in COPIES), copies, quick=(TP2_EP2,)),
    Chapter((RouterStep(forced="spread"),), (SPREAD.name,), spread, quick=(SINGLE, EP2)),
)
