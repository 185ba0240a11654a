"""The pinned corpus of routers that a strategy forces.

Where experts are in groups, all tokens like the same groups best: what is routed to these alone was not forced, or was
limited after it had been.
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
ALONE = 1e6  # a deviation of a bias beside which logits are nothing
_LIKED = 2.0  # by how much the logits of liked groups are raised, and of all others lowered


@dataclass(frozen=True)
class ForcingRecipe:
    """How to draw one workload of a forced router."""

    name: str
    strategy: str
    parameter: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (26, 15, 22, 19)  # of rank r in microbatch m: the entry r + m modulo the length
    schedule: str = "F0 B0"
    forced: Literal["routes", "draws", "masked", "spread"] = "routes"
    again: bool = False  # every microbatch has the tokens of the first
    copies: bool = False  # the ranks of a tp group hold the same tokens
    routers: int = 1  # that take turns, as if of several layers
    scale: float = 1.0  # of the router's weights; forced logits have nothing to do with it
    beside: tuple[ForcingRecipe, ...] = ()  # other routers, each of which routes before every forward of this one


_SOFTMAX = {"experts": 24, "top_k": 4, "routing.groups": (4, 2), "routing.scale": 2.5}
_SIGMOID = {**_SOFTMAX, "routing.score": "sigmoid", "routing.normalise": True}
_BIASED = {**_SIGMOID, "routing.balance_bias": True}
_ONE = {**_BIASED, "routing.groups": (4, 1), "routing.group_score": "top2_sum"}
_FINE = {**_SOFTMAX, "routing.groups": (8, 2)}
_ONE_WITHOUT = (14, 0, 18, 9)
_MASKED = {"experts": 8, "top_k": 4, "routing.normalise": True}
_MANY = {"experts": 256, "top_k": 8}
_ALONE = {**_MANY, "routing.score": "softmax_topk"}  # a logit of a million weighs all there is
_ALL = {**_SIGMOID, "routing.groups": (4, 4), "routing.group_score": "max"}
_LOUD = 4e38  # in float32 some of the router's own logits are infinite, and the others leave no digit of a sum
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
)
# A kept bias that is looked up by less than its router would be one of these.
_OTHERS = (
    ForcingRecipe("other-deviation", "biased", -0.25, _ALONE, (4,), "F0", _DRAWN),
    ForcingRecipe("other-experts", "biased", -3.0, {}, (4,), "F0", _DRAWN),
    ForcingRecipe("other-dtype", "biased", -1.0, {**_ALONE, "dtype": torch.float64}, (4,), "F0", _DRAWN),
)
BESIDE = (
    ForcingRecipe("forced-kept-bias-beside", "biased", -3.0, _MANY, (40, 32), "F0", _DRAWN, beside=_OTHERS),
    ForcingRecipe(
        "forced-kept-bias-alone-beside", "biased", -1e6, _ALONE, (5, 9), _TWICE, _DRAWN, routers=2, beside=_OTHERS
    ),
)
SPREAD = ForcingRecipe(
    "forced-bias-spread", "biased", 0.0, {"experts": 64, "top_k": 8}, (512,), _SIXTEEN, "spread", again=True
)
_BESIDE = ("round_robin", "random", "worst_rank")  # forces ids, logits, and ids by the ranks of the exchange group
COPIES = (
    ForcingRecipe(
        "forced-random-copies", "random", None, {}, (48,), _TWICE, _DRAWN, again=True, copies=True, scale=_LOUD
    ),
    # As many tokens as leave a remainder, so that it shows where each rank begins.
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
_NOBODY = (0, 1, 2, 3, 5)  # experts whose logits are -inf: all that some tokens are forced to, and one of others


def names() -> tuple[str, ...]:
    """Return the names of all but copies."""
    return tuple(recipe.name for recipe in (*FORCINGS, *DRAWS, *BESIDE, *MASKED))


def forcings(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads; the variant only has to be one that the backend knows."""
    yield from (_workload(recipe, variant, layout) for recipe in (*FORCINGS, *DRAWS, *BESIDE, *MASKED))


def spread(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the router whose bias is to become larger."""
    yield _workload(SPREAD, variant, layout)


def copies(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield those in which tensor ranks hold copies, where there are several."""
    if layout.tp > 1:
        yield from (_workload(recipe, variant, layout) for recipe in COPIES)


def _workload(recipe: ForcingRecipe, variant: str, layout: Layout) -> Workload:
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
        twist=Twist(beside=tuple(_workload(other, variant, layout) for other in recipe.beside)),
    )


def beside_forced(workload: Workload) -> list[Twin]:
    """Build a router with forced routing beside the router, of as many experts, which routes before it."""
    sizes = {"experts": workload.config.experts, "top_k": workload.config.top_k}
    recipes = [ForcingRecipe(strategy, strategy, None, sizes, (4, 3), "F0") for strategy in _BESIDE]
    others = [_workload(recipe, workload.config.variant, workload.layout) for recipe in recipes]
    how = "beside a router forced by {}"
    return [twin(workload, how.format(other.name), bits=True, twist=Twist(beside=(other,))) for other in others]


def with_deviations(workload: Workload) -> list[Twin]:
    """Draw biases of larger deviations."""
    return [
        twin_with(workload, f"with a bias of deviation {each:g}", **{"routing.forced": (("biased", each),)})
        for each in (0.5, 2.0)
    ]


def liked_groups(config: Config) -> tuple[int, ...]:
    """Return the groups that all tokens like best, as many as are chosen; none without groups."""
    return () if config.routing.groups is None else tuple(range(1, 1 + config.routing.groups[1]))


def forces_logits(workload: Workload) -> bool:
    """Whether the strategy in force replaces logits, and not ids."""
    return workload.config.routing.forced[0][0] in FORCING_LOGITS


def forces_ids(workload: Workload) -> bool:
    """Whether the strategy in force replaces the choice, and no logits."""
    return not forces_logits(workload)


def holds_copies(workload: Workload) -> bool:
    """Whether the ranks of a tensor parallel group hold the same tokens."""
    return workload.config.token_copies


def several_sources(workload: Workload) -> bool:
    """Whether ids are forced on several ranks of an expert parallel group, each with tokens of its own."""
    return forces_ids(workload) and not holds_copies(workload) and workload.layout.ep * workload.layout.etp > 1


def draws_at_random(workload: Workload) -> bool:
    """Whether logits are drawn without a bias."""
    return workload.config.routing.forced[0][0] == "random"


def biased(workload: Workload) -> bool:
    """Whether a bias of each expert is drawn."""
    return workload.config.routing.forced[0][0] == "biased"


def beside_others(workload: Workload) -> bool:
    """Whether other routers with a kept bias are beside the router."""
    return bool(workload.twist.beside)


def bias_decides_alone(workload: Workload) -> bool:
    """Whether a bias is so large that nothing else decides."""
    return biased(workload) and abs(workload.config.routing.forced[0][1] or 0.0) >= ALONE


def _parameters(config: Config, generator: Any) -> dict[ParameterKey, Tensor]:
    """Return a router by which an entry of one in every token decides among groups."""
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
    """Return a router by which the logit of expert e is the token's entry e, above zero, or -inf."""
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
