"""The pinned workloads of routers: every score function, bias, groups, and extreme inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads import router_model_sizes as model_sizes
from moe_conformance.workloads.records import draw, schedule
from moe_conformance.workloads.records.runs import RouterStep
from moe_conformance.workloads.records.workload import Batch, Drawn, Twist, Workload
from moe_conformance.workloads.selection.profiles import Profile, likened_layouts

TOKENS = (18, 8, 26, 12, 22, 10, 14, 20)  # of rank r: the entry r modulo the length
ONE_WITHOUT = (14, 0, 18, 8)


@dataclass(frozen=True)
class RouterRecipe:
    """The name and options of one workload of a router."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = TOKENS
    schedule: str = "F0 B0"
    magnitude: float = 1.0  # of the tokens: large ones overflow a softmax that does not subtract its maximum
    bias: float = -0.9  # the centre of balance biases
    twins: bool = False  # experts in pairs whose logits differ by less than bfloat16 resolves
    tied: bool = False  # experts in pairs whose logits are the same
    lowered: float = 0.0  # subtracted from all logits, so that scores of a sigmoid are as small as an epsilon
    near: bool = False  # biases of steps of 2^-13: at 0.9, less than those of bfloat16 and float16
    likened: bool = False  # runs that must route alike are compared with it
    rehearsed: bool = False  # after a step with other parameters
    shows: frozenset[str] = frozenset()
    profile: Profile = "quick"


_SIGMOID = {"routing.score": "sigmoid"}
_BIASED = {"routing.score": "sigmoid", "routing.balance_bias": True}
_NORMAL = {"routing.normalise": True}
_GATE_BIAS = {"gate_bias": True}
_GROUPS = {
    "experts": 24,
    "top_k": 4,
    "routing.groups": (4, 2),
}  # enough slots for the limit to bind; more experts than groups


def _of_model(name: str, options: dict[str, Any], profile: Profile = "quick") -> RouterRecipe:
    """Return a router of a published size, with more tokens if K = 1 and groups seldom change the selection."""
    seldom = options["top_k"] == 1 and "routing.groups" in options
    return RouterRecipe(name, options, tuple(4 * T for T in TOKENS) if seldom else TOKENS, profile=profile)


ROUTERS = (
    RouterRecipe("route-softmax"),
    RouterRecipe("route-softmax-normalised", _NORMAL, likened=True),
    RouterRecipe("route-softmax-scaled", {"routing.scale": 2.5}),
    RouterRecipe("route-softmax-normalised-scaled", {**_NORMAL, "routing.scale": 2.5}),
    RouterRecipe("route-softmax-topk", {"routing.score": "softmax_topk"}),
    RouterRecipe("route-softmax-topk-scaled", {"routing.score": "softmax_topk", "routing.scale": 2.5}),
    RouterRecipe("route-sigmoid", _SIGMOID),
    RouterRecipe("route-sigmoid-normalised-scaled", {**_SIGMOID, **_NORMAL, "routing.scale": 2.5}),
    RouterRecipe("route-sigmoid-biased", _BIASED),
    RouterRecipe("route-sigmoid-biased-normalised-scaled", {**_BIASED, **_NORMAL, "routing.scale": 2.5}),
    RouterRecipe("route-sigmoid-biased-upwards", _BIASED, bias=0.3),
    RouterRecipe("route-sqrtsoftplus", {"routing.score": "sqrtsoftplus"}),
    RouterRecipe(
        "route-sqrtsoftplus-biased-normalised",
        {"routing.score": "sqrtsoftplus", "routing.balance_bias": True, **_NORMAL},
    ),
    RouterRecipe("route-groups-top2", {**_BIASED, **_NORMAL, **_GROUPS}, likened=True),
    RouterRecipe("route-groups-top2-softmax", _GROUPS, shows=frozenset({"no forced routing"})),
    RouterRecipe("route-groups-topk", {**_BIASED, **_NORMAL, **_GROUPS, "top_k": 6, "routing.group_score": "topk_sum"}),
    RouterRecipe("route-groups-topk-softmax", {**_GROUPS, "top_k": 6, "routing.group_score": "topk_sum"}),
    RouterRecipe(
        "route-groups-max", {"experts": 24, "top_k": 3, "routing.groups": (4, 1), "routing.group_score": "max"}
    ),
    RouterRecipe("route-top-1", {"top_k": 1}),
    RouterRecipe("route-top-1-normalised", {"top_k": 1, **_SIGMOID, **_NORMAL}),
    RouterRecipe("route-top-all", {"top_k": 8}),
    RouterRecipe("route-odd-experts", {"experts": 6, "top_k": 3, "hidden": 40}),
    RouterRecipe("route-many-experts", {"experts": 256, "top_k": 8}),
    RouterRecipe("route-hundreds-of-experts", {"experts": 384, "top_k": 10}),
    RouterRecipe(
        "route-groups-many-experts", {**_BIASED, **_NORMAL, "experts": 256, "top_k": 8, "routing.groups": (8, 4)}
    ),
    RouterRecipe("route-small-scores", {**_SIGMOID, **_NORMAL}, lowered=25.0),  # of 1e-11, as is their sum
    # An odd K selects one expert of a pair.
    RouterRecipe("route-near-ties", {"top_k": 3}, twins=True, likened=True),
    RouterRecipe("route-ties", {"top_k": 3}, tied=True, likened=True),
    RouterRecipe("route-large-logits", magnitude=64.0),
    RouterRecipe("route-large-logits-sqrtsoftplus", {"routing.score": "sqrtsoftplus"}, magnitude=64.0),
    # Tokens of zeros: all scores are equal.
    *(
        RouterRecipe(f"route-near-biases-{name}", {**_BIASED, "top_k": 3, "dtype": dtype}, magnitude=0.0, near=True)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    ),
    RouterRecipe("route-gate-bias-softmax-topk", {"routing.score": "softmax_topk", **_GATE_BIAS}, tokens=ONE_WITHOUT),
    RouterRecipe("route-gate-bias-sigmoid", {**_BIASED, **_NORMAL, **_GATE_BIAS}, schedule="F0 F1 B0 B1"),
    RouterRecipe("route-gate-bias-bfloat16", {"dtype": torch.bfloat16, **_GATE_BIAS}, profile="full"),
    RouterRecipe("route-wide-float32", {**_SIGMOID, **_NORMAL, "dtype": torch.bfloat16, "router_dtype": torch.float32}),
    RouterRecipe(
        "route-wide-float64", {**_BIASED, **_NORMAL, "routing.scale": 2.5, "router_dtype": torch.float64}, bias=0.3
    ),
    RouterRecipe(
        "route-wide-float32-of-float16",
        {"routing.score": "softmax_topk", "dtype": torch.float16, "router_dtype": torch.float32},
        profile="full",
    ),
    RouterRecipe("route-rank-without-tokens", tokens=ONE_WITHOUT),
    RouterRecipe("route-in-flight", schedule="F0 F1 B0 B1"),
    RouterRecipe("route-inference", {**_BIASED, **_NORMAL, **_GROUPS, "routing.scale": 2.5}, schedule="N0 F1 I2 B1"),
    RouterRecipe("route-rehearsed", {**_BIASED, **_NORMAL}, rehearsed=True),
    RouterRecipe("route-bfloat16", {"dtype": torch.bfloat16}, likened=True),
    RouterRecipe("route-float16", {"dtype": torch.float16}),
    RouterRecipe("route-float64", {"dtype": torch.float64}),
    *(_of_model(name, options) for name, options in model_sizes.QUICK.items()),
    *(_of_model(name, options, "full") for name, options in model_sizes.FULL.items()),
)


def routing_corpus(variant: str, layout: Layout, profile: Profile = "quick") -> Iterator[Workload]:
    """Yield the router workloads of a profile; they do not depend on the variant."""
    for recipe in ROUTERS:
        if profile == "quick" and recipe.profile == "full":
            continue
        yield router_workload(recipe, variant, layout)


def router_workload(recipe: RouterRecipe, variant: str, layout: Layout) -> Workload:
    """Draw the workload of a recipe on a layout."""
    config = Config(variant=variant).changed(recipe.config)
    microbatches = schedule.microbatches(recipe.schedule)
    tokens = tuple(
        tuple(recipe.tokens[(rank + microbatch) % len(recipe.tokens)] for rank in range(layout.world))
        for microbatch in range(microbatches)
    )
    batches = Drawn(tokens, partial(_batch, recipe, config, layout))
    generator = draw.generator(recipe.name, layout.name, "router")
    parameters = draw.router_parameters(config, generator, bias=recipe.bias, twins=recipe.twins)
    if recipe.tied:
        weight_ED = parameters["router", None]
        weight_ED[1::2] = weight_ED[::2]
    if recipe.lowered:
        parameters["router", None][:, -1] = 1.0
    if recipe.near:
        steps_E = torch.randperm(config.experts, generator=generator)
        parameters["balance_bias", None] = recipe.bias + 2.0**-13 * steps_E.float()
    likened: Literal["", "quick"] = "quick" if recipe.likened and layout in likened_layouts("quick") else ""
    twist = Twist(rehearsed=recipe.rehearsed)
    run = (recipe.name, RouterStep(), config, layout, batches, recipe.schedule, parameters)
    return Workload(*run, twist=twist, likened=likened, shows=recipe.shows)


def _batch(recipe: RouterRecipe, config: Config, layout: Layout, microbatch: int, rank: int) -> Batch:
    tokens = recipe.tokens[(rank + microbatch) % len(recipe.tokens)]
    generator = draw.generator(recipe.name, layout.name, microbatch, rank)
    batch = draw.route_batch(tokens, config, generator, recipe.magnitude)
    if recipe.lowered:
        batch.x_TD[:, -1] = -recipe.lowered
    return batch
