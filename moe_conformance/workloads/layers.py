"""The pinned workloads of whole layers: router, routed experts and, in some, shared experts.

A layer is judged by values, so its selection of experts must be unambiguous: tokens are drawn until every one has a
clear margin between the scores of the experts that it selects and those of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.reference.capacity import limits
from moe_conformance.reference.routing import routes
from moe_conformance.workloads.recipes import EVEN, ONE_WITHOUT, SIX_IN_FLIGHT, UNEVEN
from moe_conformance.workloads.records import draw, schedule
from moe_conformance.workloads.records.covering import pairwise
from moe_conformance.workloads.records.drawn_parameters import DrawnParameters
from moe_conformance.workloads.records.half_precision import in_float16
from moe_conformance.workloads.records.runs import LayerStep
from moe_conformance.workloads.records.workload import Asynchrony, Batch, Drawn, Lead, ParameterKey, Twist, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

MARGIN = 1 / 16  # in selection scores: more than rounding to bfloat16 can move them
DROP_MARGIN = 1 / 512  # in weights and in scores, between the last slot that an expert keeps and the first it drops
_CANDIDATES = 8  # drawn at once for each token that is wanted
_ROUNDS = 20
_SILENCED = ("gate", "up", "down", "shared_down")


@dataclass(frozen=True)
class LayerRecipe:
    """The name and options of one workload of a layer."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = EVEN
    schedule: str = "F0 B0"
    lead: Lead = "flat"
    asynchrony: Asynchrony = "plain"
    silent: bool = False  # routed experts and down of shared ones are zero: the output is output biases only
    rehearsed: bool = False  # after a step with other parameters
    likened: bool = False  # runs that must give the same results are compared with it
    interleaved: bool = False  # with another of the same sizes: operations alternate
    margin: float = MARGIN  # least difference of scores for every token
    profile: Profile = "quick"


_ONE = {"shared.ffn": (24,)}
_GATED = {**_ONE, "shared.gate": True}
_SEVERAL = {"shared.ffn": (16, 24)}
_LIKE_ROUTED = {"shared.ffn": (16,)}  # of their width, as some models have it
_BESIDE = {**_GATED, "shared.overlap": True}
_BIASED = {**_LIKE_ROUTED, "shared.bias": True}
_BIASED_WIDER = {**_ONE, "shared.bias": True}
_BIASED_GATED = {**_GATED, "shared.bias": True}
_BIASED_SEVERAL = {**_SEVERAL, "shared.bias": True}
_SCALED = {"routing.score": "sigmoid", "routing.normalise": True, "routing.scale": 2.5}
_NORMAL = {"routing.normalise": True}
_CHOSEN = {"routing.score": "softmax_topk"}
_ROOT = {"routing.score": "sqrtsoftplus", "routing.normalise": True, "routing.balance_bias": True}
_DOZEN = {"experts": 12}
_BFLOAT16 = {"dtype": torch.bfloat16}
_FLOAT16 = {"dtype": torch.float16}

_LAYERS = (
    LayerRecipe("layer-even"),
    LayerRecipe("layer-normalised-even", _NORMAL),  # as of Mixtral, Qwen3-MoE and GShard
    LayerRecipe("layer-uneven", tokens=UNEVEN, profile="full"),
    LayerRecipe("layer-few-uneven", tokens=(3, 1, 2, 0)),  # replicas of an expert have tokens for it or none
    LayerRecipe("layer-sigmoid-scaled-even", _SCALED, profile="full"),
    LayerRecipe("layer-rank-without-tokens", tokens=ONE_WITHOUT, profile="full"),
    LayerRecipe("layer-in-flight-uneven", tokens=UNEVEN, schedule="F0 F1 B0 B1", likened=True),
    LayerRecipe("layer-six-in-flight-even", {**_SCALED, "top_k": 3}, schedule=SIX_IN_FLIGHT),
    LayerRecipe("layer-two-alive-uneven", tokens=UNEVEN, schedule="F0 F1 B0 B1", interleaved=True),
    LayerRecipe("layer-top-1-uneven", {"top_k": 1}, tokens=UNEVEN),
    LayerRecipe("layer-top-1-rank-without-tokens", {"top_k": 1}, tokens=ONE_WITHOUT),
    LayerRecipe("layer-top-3-normalised-uneven-float16", {**_NORMAL, **_FLOAT16, "top_k": 3}, tokens=UNEVEN),
    LayerRecipe("layer-top-5-softmax-topk-uneven", {**_DOZEN, **_CHOSEN, "top_k": 5}, tokens=UNEVEN),
    LayerRecipe("layer-top-6-sqrtsoftplus-uneven", {**_DOZEN, **_ROOT, "top_k": 6}, tokens=UNEVEN),
    LayerRecipe("layer-even-bfloat16", _BFLOAT16),
    LayerRecipe("layer-wide-router-even-bfloat16", {**_BFLOAT16, "router_dtype": torch.float32}),
    LayerRecipe("shared-even", _ONE),
    LayerRecipe("shared-uneven", _ONE, tokens=UNEVEN, profile="full"),
    LayerRecipe("shared-rank-without-tokens", _ONE, tokens=ONE_WITHOUT),
    LayerRecipe("shared-scaled-even", {**_ONE, **_SCALED}),
    LayerRecipe("shared-top-all-even", {**_ONE, "top_k": 8}, profile="full"),
    LayerRecipe("shared-two-dims-even", _ONE, lead="two_dims"),
    LayerRecipe("shared-accumulated-even", _ONE, schedule="F0 B0 F1 B1", profile="full"),
    LayerRecipe("shared-in-flight-uneven", _ONE, tokens=UNEVEN, schedule="F0 F1 B1 B0"),
    LayerRecipe("shared-inference-even", _GATED, schedule="N0 F1 I2 B1"),
    LayerRecipe("shared-even-bfloat16", {**_ONE, **_BFLOAT16}),
    LayerRecipe("shared-even-float64", {**_ONE, "dtype": torch.float64}, profile="full"),
    LayerRecipe("shared-gate-even", _GATED),
    LayerRecipe("shared-gate-scaled-even", {**_GATED, **_SCALED}, profile="full"),
    LayerRecipe("shared-gate-rank-without-tokens", _GATED, tokens=ONE_WITHOUT, profile="full"),
    LayerRecipe("shared-gate-in-flight-uneven", _GATED, tokens=UNEVEN, schedule="F0 F1 B0 B1"),
    LayerRecipe("shared-gate-even-bfloat16", {**_GATED, **_BFLOAT16}),
    LayerRecipe("shared-several-even", _SEVERAL),
    LayerRecipe("shared-several-gate-uneven", {**_SEVERAL, "shared.gate": True}, tokens=UNEVEN),
    LayerRecipe("shared-as-routed-uneven", _LIKE_ROUTED, tokens=UNEVEN),
    LayerRecipe("shared-as-routed-several-scaled-even", {"shared.ffn": (16, 16), **_SCALED}),
    LayerRecipe(
        "shared-as-routed-in-flight-uneven-bfloat16",
        {"shared.ffn": (16, 16), **_SCALED, **_BFLOAT16},
        tokens=UNEVEN,
        schedule="F0 F1 B1 B0",
    ),
    LayerRecipe("shared-beside-even", {**_ONE, "shared.overlap": True}),
    LayerRecipe("shared-beside-rank-without-tokens", _BESIDE, tokens=ONE_WITHOUT),
    LayerRecipe("shared-beside-in-flight-even", _BESIDE, schedule="F0 F1 B0 B1", profile="full"),
    LayerRecipe("shared-beside-in-flight-uneven", _BESIDE, tokens=UNEVEN, schedule="F0 F1 B1 B0"),
    LayerRecipe("shared-beside-poisoned-uneven", _BESIDE, tokens=UNEVEN, schedule="F0 F1 B1 B0", asynchrony="poisoned"),
    LayerRecipe("shared-beside-watched-even", _BESIDE, asynchrony="watched"),
    LayerRecipe("shared-beside-inference-even", _BESIDE, schedule="N0 F1 I2 B1"),
    LayerRecipe("shared-beside-even-bfloat16", {**_BESIDE, **_BFLOAT16}),
    LayerRecipe("shared-beside-two-dims-even", _BESIDE, lead="two_dims"),
    LayerRecipe("shared-rehearsed-even", _GATED, rehearsed=True),
    LayerRecipe(
        "layer-groups-biased-even", {**_SCALED, "experts": 12, "routing.balance_bias": True, "routing.groups": (3, 1)}
    ),
    LayerRecipe("shared-bias-even", _BIASED),
    LayerRecipe("shared-bias-alone", _BIASED, tokens=UNEVEN, silent=True),
    LayerRecipe("shared-bias-rank-without-tokens", _BIASED_WIDER, tokens=ONE_WITHOUT),
    LayerRecipe("shared-bias-gate-in-flight-uneven", _BIASED_GATED, tokens=UNEVEN, schedule="F0 F1 B1 B0"),
    LayerRecipe("shared-bias-several-gate-uneven", {**_BIASED_SEVERAL, "shared.gate": True}, tokens=UNEVEN),
    LayerRecipe("shared-bias-several-even-bfloat16", {**_BIASED_SEVERAL, **_BFLOAT16}, profile="full"),
    LayerRecipe("shared-bias-gate-even-bfloat16", {**_BIASED_GATED, **_BFLOAT16}, profile="full"),
    LayerRecipe("shared-bias-beside-even", {**_BIASED_SEVERAL, "shared.overlap": True}, profile="full"),
)


def _crossed() -> tuple[LayerRecipe, ...]:
    """Return layers of 12 experts with every pair of values of K, score, tokens, dtype and shared experts.

    With the softmax of 12 logits a selection of more than three experts has no clear margin.
    """
    options = {
        "top_k": (1, 3, 5, 6, 10),
        "weighing": ("softmax", "softmax-normalised", "softmax-topk", "sigmoid", "sigmoid-normalised", "sqrtsoftplus"),
        "tokens": (EVEN, UNEVEN, ONE_WITHOUT),
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "shared": ((), (24,)),
    }
    rows = pairwise(options, lambda row: row["top_k"] <= 3 or row["weighing"] not in ("softmax", "softmax-normalised"))
    found = []
    for row in rows:
        score, normalised, _ = row["weighing"].partition("-normalised")
        kind = {EVEN: "even", UNEVEN: "uneven", ONE_WITHOUT: "rank-without-tokens"}[row["tokens"]]
        prefix = "shared" if row["shared"] else "layer"
        dtype = str(row["dtype"]).removeprefix("torch.")
        name = f"{prefix}-top-{row['top_k']}-of-12-{row['weighing']}-{kind}-{dtype}"
        config = {
            "experts": 12,
            "top_k": row["top_k"],
            "dtype": row["dtype"],
            "shared.ffn": row["shared"],
            "routing.score": score.replace("-", "_"),
            "routing.normalise": bool(normalised),
        }
        found.append(LayerRecipe(name, config, row["tokens"], profile="full"))
    return tuple(found)


# Layers whose gate allows little else are judged by these, also with replicas of their experts (edp > 1).
PLAIN = ("layer-even", "layer-normalised-even", "layer-few-uneven")
LAYERS = (*_LAYERS, *in_float16(_LAYERS), *_crossed())

_TIGHT_BARE = {"capacity.factor": 0.5, "capacity.drop_policy": "position"}
_TIGHT = {"shared.ffn": (24,), **_TIGHT_BARE}

_GSHARD = {"capacity.factor": 0.5, "capacity.drop_policy": "position", "routing.normalise": True}
_ALONE = {"capacity.factor": 0.5}  # without shared experts, as not every layer has them

# Layers that drop slots, which are not in `LAYERS`: see `dropping_layers.py`.
DROPPING = (
    LayerRecipe("layer-dropped-even", _ALONE, tokens=(22,)),  # 22 K / 2 E is no whole number for 8 experts
    LayerRecipe("layer-dropped-normalised-even", {**_ALONE, "routing.normalise": True}, tokens=(22,)),
    LayerRecipe("layer-dropped-gshard-even", _GSHARD, tokens=(22,)),
    LayerRecipe("layer-dropped-position-even", {**_ALONE, "capacity.drop_policy": "position"}, tokens=(22,)),
    LayerRecipe("dropping-half-even", _TIGHT, tokens=(24,)),
    LayerRecipe("dropping-half-inference-even", _TIGHT, tokens=(24,), schedule="N0 F1 I2 B1"),
    LayerRecipe("dropping-half-two-dims-even", _TIGHT, tokens=(24,), lead="two_dims"),
    LayerRecipe("dropping-half-gate-even", {**_TIGHT, "shared.gate": True}, tokens=(24,)),
    LayerRecipe("dropping-bare-uneven", _TIGHT_BARE, tokens=(24, 30, 17, 21)),
    LayerRecipe("dropping-all-even", {**_TIGHT, "capacity.factor": 0.0}),
    LayerRecipe("dropping-all-rank-without-tokens", {**_TIGHT, "capacity.factor": 0.0}, tokens=ONE_WITHOUT),
)

# Repeated steps whose results are not kept. Logits have half the bytes of x, so that a router that keeps them shows.
REPEATED = LayerRecipe("shared-repeated-even", {**_ONE, "hidden": 16}, tokens=(64,), schedule="R0 R0 R0 F0 B0")
# All experts are selected, and the workload's router is zero: the logits do not depend on the factors.
JITTERED = LayerRecipe("layer-jittered-even-bfloat16", {**_BFLOAT16, "top_k": 8, "jitter": 0.25})
# Its routes differ from forward to forward.
JITTERED_TOO = LayerRecipe("layer-recomputed-jitter-even", {"jitter": 0.5}, schedule="F0 F1 B0 B1")


def layers(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the layer workloads of a profile for a variant on a layout."""
    for recipe in LAYERS:
        if profile == "quick" and recipe.profile == "full":
            continue
        if layout.world > USUAL_RANKS or (recipe.asynchrony != "plain" and layout.world == 1):
            continue
        yield layer_workload(recipe, variant, layout)


def plain(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the layers that are judged on more layouts than the others."""
    yield from (workload for workload in layers(variant, layout, profile) if workload.name in PLAIN)


def others(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the layers that are not in `PLAIN`."""
    yield from (workload for workload in layers(variant, layout, profile) if workload.name not in PLAIN)


def repeated(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the layer that repeats the same step."""
    if layout.world <= USUAL_RANKS:
        yield layer_workload(REPEATED, variant, layout)


def layer_workload(recipe: LayerRecipe, variant: str, layout: Layout) -> Workload:
    """Draw the workload of a recipe for a variant on a layout; it is the same for all variants."""
    return _workload(recipe.name, layout).through(variant)


@lru_cache(maxsize=64)  # more than a layout has
def _workload(name: str, layout: Layout) -> Workload:
    recipe = next(made for made in (*LAYERS, *DROPPING, REPEATED, JITTERED, JITTERED_TOO) if made.name == name)
    workload = draw_layer(recipe, layout)
    if not recipe.interleaved:
        return workload
    other = draw_layer(replace(recipe, name=f"{recipe.name}, the other"), layout)
    return replace(workload, twist=replace(workload.twist, beside=(other,), interleaved=True))


def draw_layer(recipe: LayerRecipe, layout: Layout) -> Workload:
    """Draw the workload of a recipe on a layout."""
    config = Config().changed(recipe.config)
    if config.experts % layout.ep or config.experts < 2 * layout.ep:
        E = 3 * layout.ep
        config = replace(config, experts=E, top_k=E if config.top_k == config.experts else config.top_k)

    def of_layer() -> dict[ParameterKey, Tensor]:
        drawn = layer_parameters(config, draw.generator(recipe.name, layout.name, "layer"))
        if recipe.silent:
            drawn |= {key: torch.zeros_like(value) for key, value in drawn.items() if key[0] in _SILENCED}
        return drawn

    parameters = DrawnParameters(of_layer)
    microbatches = schedule.microbatches(recipe.schedule)
    numbers = [[(rank + m) % len(recipe.tokens) for rank in range(layout.world)] for m in range(microbatches)]
    tokens = tuple(tuple(recipe.tokens[number] for number in ranks) for ranks in numbers)

    def batch(microbatch: int, rank: int) -> Batch:
        generator = draw.generator(recipe.name, layout.name, microbatch, rank)
        for _ in range(_ROUNDS):
            drawn = layer_batch(tokens[microbatch][rank], config, parameters, generator, recipe.margin)
            if drop_margin(drawn.x_TD, config, parameters) > DROP_MARGIN:
                return drawn
        raise ValueError(f"{recipe.name}: in none of {_ROUNDS} draws it is clear which slots are kept")

    return Workload(
        recipe.name,
        LayerStep(),
        config,
        layout,
        Drawn(tokens, batch),
        recipe.schedule,
        parameters,
        recipe.lead,
        recipe.asynchrony,
        twist=Twist(rehearsed=recipe.rehearsed),
        likened="quick" if recipe.likened else "",
    )


def layer_parameters(config: Config, generator: torch.Generator) -> dict[ParameterKey, Tensor]:
    """Return the parameters of a layer: router, with doubled weights for clear margins, experts and shared experts."""
    parameters = draw.router_parameters(config, generator, bias=0.0, twins=False)
    parameters["router", None] = parameters["router", None] * 2
    parameters |= draw.expert_parameters(config, generator)
    for j, width in enumerate(config.shared.ffn):
        drawn = draw.expert_parameters(replace(config, ffn=width, experts=1), generator)
        parameters |= {(f"shared_{name}", j): value for (name, _), value in drawn.items()}
        if config.shared.bias:
            bias_D = torch.randn(config.hidden, generator=generator, dtype=torch.float64)
            parameters["shared_bias", j] = bias_D.to(config.dtype)
    if config.shared.gate:
        score_1D = torch.randn(1, config.hidden, generator=generator, dtype=torch.float64) * config.hidden**-0.5
        parameters["shared_score", None] = score_1D.to(config.dtype)
    return parameters


def leaves_a_bias(workload: Workload) -> bool:
    """Return whether the output of every token is the bias of the only shared expert, as all else returns zero.

    With a gate it is not, which multiplies the bias.
    """
    config = workload.config
    if not config.shared.bias or config.shared.gate or len(config.shared.ffn) > 1:
        return False
    return not any(bool(value.any()) for (name, _), value in workload.parameters.items() if name in _SILENCED)


def layer_batch(
    T: int,
    config: Config,
    parameters: Mapping[ParameterKey, Tensor],
    generator: torch.Generator,
    margin: float = MARGIN,
) -> Batch:
    """Return normal tokens with a clear selection of experts, and an upstream gradient (T, D).

    Raises:
        ValueError: too few of the drawn tokens have the margin.
    """

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, config.hidden, generator=generator, dtype=torch.float64).to(config.dtype)

    clear_TD = normal(0)
    for _ in range(_ROUNDS):
        if len(clear_TD) >= T:
            break
        pool_TD = normal(_CANDIDATES * T)
        clear_TD = torch.cat([clear_TD, pool_TD[margins(pool_TD, config, parameters) > margin]])
    if len(clear_TD) < T:
        raise ValueError(f"{len(clear_TD)} of the tokens that were drawn have a clear choice; {T} are wanted")
    none = torch.empty(T, 0)
    return Batch(clear_TD[:T].contiguous(), none.long(), none, normal(T))


def margins(x_TD: Tensor, config: Config, parameters: Mapping[ParameterKey, Tensor]) -> Tensor:
    """Return the margin (T,) of every token: by how much selected experts exceed the others, in selection scores."""
    logits_TE = x_TD.double() @ parameters["router", None].double().T
    return routes.margins(
        logits_TE,
        top_k=config.top_k,
        score=config.routing.score,
        bias_E=parameters.get(("balance_bias", None)),
        groups=config.routing.groups,
        group_score=config.routing.group_score,
    )


def drop_margin(x_TD: Tensor, config: Config, parameters: Mapping[ParameterKey, Tensor]) -> float:
    """Return the least margin between the last kept and the first dropped slot of an expert, over all experts.

    It is the least over weights and scores (`Claims.drop_by`), and over the capacity rounded up and down. Infinite if
    nothing is dropped, or not by weight.
    """
    if config.capacity.factor is None or config.capacity.drop_policy != "weights":
        return math.inf
    sizes = (len(x_TD), config.top_k, config.experts)
    minimum, routing = config.capacity.minimum, config.routing
    up, down = (
        min(limits.capacities(*sizes, factor=config.capacity.factor, minimum=minimum, rounding=rounding))
        for rounding in ("up", "down")
    )
    logits_TE = x_TD.double() @ parameters["router", None].double().T
    routed = routes.route(
        logits_TE,
        top_k=config.top_k,
        score=routing.score,
        normalise=routing.normalise,
        scale=routing.scale,
        bias_E=parameters.get(("balance_bias", None)),
        groups=routing.groups,
        group_score=routing.group_score,
    )
    scores_TK = routes.scores(logits_TE, routing.score).gather(1, routed.ids_TK)
    least = math.inf
    for ranked_TK, e, room in product((routed.weights_TK, scores_TK), range(config.experts), {up, down}):
        heaviest = ranked_TK[routed.ids_TK == e].sort(descending=True).values
        if 0 < room < len(heaviest):
            least = min(least, float(heaviest[room - 1] - heaviest[room]))
    return least
