"""The pinned corpus of whole layers: routed experts behind the layer's own router, with shared experts and without.

A layer is judged on values, so that its choice of experts must not be in doubt: tokens are drawn until every one has a
clear margin between the experts that it chooses and the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.reference.routing import routes
from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus.chapter import EP2, EP2_ETP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.corpus.recipes import EVEN, ONE_WITHOUT, UNEVEN
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.workload import Asynchrony, Batch, Drawn, Lead, ParameterKey, Twist, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

MARGIN = 1 / 16  # in selection scores: more than rounding to bfloat16 can move them
_CANDIDATES = 8  # drawn at once for each token that is wanted
_ROUNDS = 20
_SILENCED = ("gate", "up", "down", "shared_down")


@dataclass(frozen=True)
class LayerRecipe:
    """How to draw one workload of a layer."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = EVEN
    schedule: str = "F0 B0"
    lead: Lead = "flat"
    asynchrony: Asynchrony = "plain"
    silent: bool = False  # routed experts are zero, and so is down of shared ones: output biases are all that is left
    rehearsed: bool = False  # behind a step with other parameters
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
_BFLOAT16 = {"dtype": torch.bfloat16}

LAYERS = (
    LayerRecipe("layer-even"),
    LayerRecipe("layer-uneven", tokens=UNEVEN, profile="full"),
    LayerRecipe("layer-sigmoid-scaled-even", _SCALED, profile="full"),
    LayerRecipe("layer-rank-without-tokens", tokens=ONE_WITHOUT, profile="full"),
    LayerRecipe("layer-in-flight-uneven", tokens=UNEVEN, schedule="F0 F1 B0 B1"),
    LayerRecipe("layer-even-bfloat16", _BFLOAT16),
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

_TIGHT = {"shared.ffn": (24,), "capacity.factor": 0.5, "capacity.drop_policy": "position"}

# Their tokens lose slots, so that they are no `LAYERS`: see `dropping_layers.py`.
DROPPING = (
    LayerRecipe("dropping-half-even", _TIGHT, tokens=(24,)),
    LayerRecipe("dropping-half-inference-even", _TIGHT, tokens=(24,), schedule="N0 F1 I2 B1"),
    LayerRecipe("dropping-half-two-dims-even", _TIGHT, tokens=(24,), lead="two_dims"),
    LayerRecipe("dropping-half-gate-even", {**_TIGHT, "shared.gate": True}, tokens=(24,)),
    LayerRecipe("dropping-all-even", {**_TIGHT, "capacity.factor": 0.0}),
    LayerRecipe("dropping-all-rank-without-tokens", {**_TIGHT, "capacity.factor": 0.0}, tokens=ONE_WITHOUT),
)

# Equal steps of which nothing is kept. Logits have half as many bytes as x: a router that keeps them is noticed.
REPEATED = LayerRecipe("shared-repeated-even", {**_ONE, "hidden": 16}, tokens=(64,), schedule="R0 R0 R0 F0 B0")


def layers(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the layer workloads of a variant on a layout."""
    for recipe in LAYERS:
        if profile == "quick" and recipe.profile == "full":
            continue
        if layout.world > USUAL_RANKS or (recipe.asynchrony != "plain" and layout.world == 1):
            continue
        yield layer_workload(recipe, variant, layout)


def repeated(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the layer that takes equal steps."""
    if layout.world <= USUAL_RANKS:
        yield layer_workload(REPEATED, variant, layout)


def layer_workload(recipe: LayerRecipe, variant: str, layout: Layout) -> Workload:
    """Draw the workload of a recipe for a variant on a layout; variants get the same one."""
    workload = _workload(recipe.name, layout)
    return replace(workload, config=replace(workload.config, variant=variant))


@cache
def _workload(name: str, layout: Layout) -> Workload:
    recipe = next(each for each in (*LAYERS, *DROPPING, REPEATED) if each.name == name)
    config = Config().changed(recipe.config)
    if config.experts % layout.ep or config.experts < 2 * layout.ep:
        E = 3 * layout.ep
        config = replace(config, experts=E, top_k=E if config.top_k == config.experts else config.top_k)
    parameters = layer_parameters(config, draw.generator(recipe.name, layout.name, "layer"))
    if recipe.silent:
        parameters |= {key: torch.zeros_like(value) for key, value in parameters.items() if key[0] in _SILENCED}
    microbatches = len({item[1:] for item in recipe.schedule.split()})
    numbers = [[(rank + m) % len(recipe.tokens) for rank in range(layout.world)] for m in range(microbatches)]
    tokens = tuple(tuple(recipe.tokens[number] for number in ranks) for ranks in numbers)

    def batch(microbatch: int, rank: int) -> Batch:
        generator = draw.generator(recipe.name, layout.name, microbatch, rank)
        return layer_batch(tokens[microbatch][rank], config, parameters, generator)

    return Workload(
        recipe.name,
        "layer",
        config,
        layout,
        Drawn(tokens, batch),
        recipe.schedule,
        parameters,
        recipe.lead,
        recipe.asynchrony,
        twist=Twist(rehearsed=recipe.rehearsed),
    )


def layer_parameters(config: Config, generator: torch.Generator) -> dict[ParameterKey, Tensor]:
    """Return the router, twice as decided as usual, the experts, and the shared experts with their biases and gate."""
    parameters = draw.router_parameters(config, generator, bias=0.0, twins=False)
    parameters["router", None] = parameters["router", None] * 2
    parameters |= draw.expert_parameters(config, generator)
    for j, width in enumerate(config.shared.ffn):
        own = draw.expert_parameters(replace(config, ffn=width, experts=1), generator)
        parameters |= {(f"shared_{name}", j): value for (name, _), value in own.items()}
        if config.shared.bias:
            bias_D = torch.randn(config.hidden, generator=generator, dtype=torch.float64)
            parameters["shared_bias", j] = bias_D.to(config.dtype)
    if config.shared.gate:
        score_1D = torch.randn(1, config.hidden, generator=generator, dtype=torch.float64) * config.hidden**-0.5
        parameters["shared_score", None] = score_1D.to(config.dtype)
    return parameters


def leaves_a_bias(workload: Workload) -> bool:
    """Whether the output is one bias, for every token: that of the only shared expert, as all else answers zero.

    A gate would multiply it.
    """
    config = workload.config
    if not config.shared.bias or config.shared.gate or len(config.shared.ffn) > 1:
        return False
    return not any(bool(value.any()) for (name, _), value in workload.parameters.items() if name in _SILENCED)


def layer_batch(T: int, config: Config, parameters: dict[ParameterKey, Tensor], generator: torch.Generator) -> Batch:
    """Return normal tokens whose choice of experts is clear, and an upstream gradient (T, D).

    Raises:
        ValueError: too few of the tokens that were drawn have the margin.
    """

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, config.hidden, generator=generator, dtype=torch.float64).to(config.dtype)

    clear_TD = normal(0)
    for _ in range(_ROUNDS):
        if len(clear_TD) >= T:
            break
        pool_TD = normal(_CANDIDATES * T)
        clear_TD = torch.cat([clear_TD, pool_TD[margins(pool_TD, config, parameters) > MARGIN]])
    if len(clear_TD) < T:
        raise ValueError(f"{len(clear_TD)} of the tokens that were drawn have a clear choice; {T} are wanted")
    none = torch.empty(T, 0)
    return Batch(clear_TD[:T].contiguous(), none.long(), none, normal(T))


def margins(x_TD: Tensor, config: Config, parameters: dict[ParameterKey, Tensor]) -> Tensor:
    """Return how clearly every token chooses, in selection scores, (T,)."""
    logits_TE = x_TD.double() @ parameters["router", None].double().T
    return routes.margins(
        logits_TE,
        top_k=config.top_k,
        score=config.routing.score,
        bias_E=parameters.get(("balance_bias", None)),
        groups=config.routing.groups,
        group_score=config.routing.group_score,
    )


CHAPTERS = (
    Chapter(
        ("layer",),
        tuple(recipe.name for recipe in LAYERS),
        layers,
        "every",
        (SINGLE, EP2, EP2_ETP2, TP2_EP2),
    ),
    Chapter(("layer",), (REPEATED.name,), repeated, quick=(EP2,)),
)
