"""Scripts of training steps that update the balance bias, with microbatches, padding, evaluation, and others.

Tokens differ between ranks and microbatches; most tokens of a rank prefer one expert, which differs between ranks.
Biases and rates are multiples of a power of two, so that updates are exact, except in models of half precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_conformance.contract import Balance, Config, RoutingOptions
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import ON_BALANCING_ROUTERS
from moe_conformance.workloads.records.training import Mode, RouterBatch
from moe_conformance.workloads.records.workload import Call, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import Profile

_E, _D, _B, _POSITIONS = 8, 16, 2, 5  # positions of each rank: E does not divide their number of slots
_BALANCE = Balance(rate=2.0**-5)
_QUANTILE = Balance(rule="quantile")
_PULL = 0.1  # factor on the router's row of the preferred expert, which is added to tokens
TP2_CP2, PP2_EP2 = Layout(4, tp=2, cp=2), Layout(4, pp=2, ep=2)

Padding = Literal["none", "end", "ragged", "one rank", "all"]


@dataclass(frozen=True)
class Step:
    """One step: the microbatches that train, their padding, and the number of updates after it."""

    microbatches: int = 1
    updates: int = 1
    padding: Padding = "none"
    modes: tuple[Mode, ...] = ()  # of further forwards, which do not train
    seed: int = 0  # of its tokens


Item = Step | Literal["save", "load", "optimise"]


@dataclass(frozen=True)
class Recipe:
    """The steps and options of one script."""

    name: str
    items: tuple[Item, ...]
    balance: Balance = _BALANCE
    options: Mapping[str, Any] = field(default_factory=dict)
    where: Literal["every layout", "small", "one rank"] = "small"
    positions: int | None = None  # of every rank; None: data parallel groups have different numbers


_AGAIN = Step(2, seed=2)
_RECIPES = (
    Recipe(
        "bias-microbatches",
        (
            *(Step(2), Step(0), Step(3, 2, seed=1), Step(1, 0, seed=4), Step(1, seed=5)),
            *("save", _AGAIN, "load", _AGAIN, "optimise"),
        ),
        where="every layout",
    ),
    Recipe(
        "bias-padding",
        tuple(Step(2, 1, padding, seed=n) for n, padding in enumerate(("end", "ragged", "one rank", "all", "none"))),  # type: ignore[arg-type]
    ),
    Recipe(
        "bias-evaluation",
        (
            Step(1, modes=("evaluation", "evaluation")),
            Step(0, modes=("no_grad", "no_grad"), seed=1),
            Step(2, modes=("no_grad", "no_grad"), seed=2),
            Step(0, modes=("evaluation",), seed=3),
            Step(1, modes=("evaluation", "no_grad", "evaluation"), seed=4),
        ),
    ),
    Recipe("bias-recomputed", (Step(2), Step(1, seed=1)), replace(_BALANCE, recompute=True), where="one rank"),
    Recipe("bias-forced-dealt", (Step(1), Step(2, seed=1)), options={"routing.forced": (("round_robin", None),)}),
    Recipe("bias-forced-random", (Step(1), Step(2, seed=1)), options={"routing.forced": (("random", None),)}),
    Recipe("bias-layers", (Step(2), Step(1, seed=1)), replace(_BALANCE, layers=2, dense_layers=1)),
    Recipe("bias-dropped", (Step(2), Step(1, seed=1)), options={"capacity.factor": 0.75}, where="one rank"),
    Recipe(
        "bias-dropped-padded",
        (Step(2), Step(1, seed=1)),
        options={"capacity.factor": 0.75, "capacity.padded": True},
        where="one rank",
    ),
    Recipe("bias-quantile", (Step(2), Step(3, seed=1), Step(0), Step(1, seed=2)), _QUANTILE, where="every layout"),
    # Of a router that selects by logits, and takes as many tokens as the experts have equal shares of.
    Recipe(
        "bias-quantile-logits",
        (Step(2), Step(3, seed=1), Step(1, seed=2)),
        _QUANTILE,
        {"routing.score": "softmax_topk"},
        where="every layout",
        positions=4,
    ),
    Recipe(
        "bias-quantile-padding",
        (Step(2, padding="ragged"), Step(padding="all"), Step(padding="one rank")),
        _QUANTILE,
    ),
    Recipe(
        "bias-bfloat16",
        (Step(), Step(), Step(), "save", Step(), "load", Step()),
        Balance(rate=0.001),
        {"dtype": torch.bfloat16},
        where="one rank",
    ),
    Recipe(
        "bias-float16",
        (Step(), Step(), Step(), "save", Step(), "load", Step()),
        Balance(rate=0.0001),  # less than half the spacing of float16 below 1
        {"dtype": torch.float16},
        where="one rank",
    ),
)
NAMES = tuple(recipe.name for recipe in _RECIPES)
_SMALL = (SINGLE, EP2)
QUICK = (*_SMALL, TP2_EP2, TP2_CP2, PP2_EP2)


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts, most of them on few ranks: on more ranks the first script covers the same."""
    if layout.etp > 1:
        return
    for recipe in _RECIPES:
        layouts = {"one rank": (SINGLE,), "small": _SMALL if profile == "quick" else (*_SMALL, TP2_CP2)}
        if recipe.where == "every layout" or layout in layouts[recipe.where]:
            yield script(recipe, variant, layout)


def script(recipe: Recipe, variant: str, layout: Layout) -> Workload:
    """Return the script of a recipe."""
    routing = RoutingOptions(score="sigmoid", normalise=True, balance_bias=True)
    plain = Config(variant=variant, experts=_E, hidden=_D, routing=routing, balance=recipe.balance)
    config = plain.changed(recipe.options)
    E = config.experts
    g = draw.generator(recipe.name)
    parameters: dict[ParameterKey, Tensor] = {}
    for layer in range(config.balance.layers):
        parameters["router", layer] = torch.randn(E, config.hidden, generator=g).to(config.dtype)
        order_E = torch.randperm(E, generator=g)
        parameters["balance_bias", layer] = _narrow_biases(order_E) if _narrow(config) else (order_E - 3) / 64
    routers = [parameters["router", layer] for layer in range(config.balance.layers)]
    calls = tuple(_call(item, recipe, config, layout, routers) for item in recipe.items)
    return Workload(recipe.name, ON_BALANCING_ROUTERS, config, layout, (), parameters=parameters, calls=calls)


def _narrow(config: Config) -> bool:
    return config.dtype != torch.float32


def _narrow_biases(order_E: Tensor) -> Tensor:
    """Return biases near 0.75 that differ by 0.0025, of which bfloat16 tells few apart, and one far above."""
    bias_E: Tensor = 0.75 + 0.0025 * order_E + 0.2 * (order_E == len(order_E) - 1)
    return bias_E


def _call(item: Item, recipe: Recipe, config: Config, layout: Layout, routers: list[Tensor]) -> Call:
    if isinstance(item, str):
        return Call(item, ({},) * layout.world)
    together = layout.tp * layout.cp
    given = []
    for rank in range(layout.world):  # all ranks of a data parallel group have the same number of positions
        positions = recipe.positions or _POSITIONS + rank // together % 2
        given.append(_given(item, f"{recipe.name} {item.seed}", config, positions, routers, rank))
    return Call("step", tuple(given))


def _given(step: Step, seed: str, config: Config, positions: int, routers: list[Tensor], rank: int) -> dict[str, Any]:
    """Return the arguments of a rank."""
    batches = []
    for m in range(step.microbatches):
        padding_T = _padding(step.padding, positions, rank, m)
        x = tuple(_tokens(router_ED, f"{seed} {m} {layer} {rank}", positions, 3 * rank + 2 * m + 5 * layer, padding_T)
                  for layer, router_ED in enumerate(routers))  # fmt: skip
        g = draw.generator("upstream", seed, m, rank)
        upstream = tuple(torch.randn(positions * _B, config.experts, generator=g) for _ in routers)
        batches.append(RouterBatch(x, upstream, padding_T))
    others = [
        RouterBatch(
            tuple(_tokens(router_ED, f"{seed} beside {n} {layer} {rank}", positions, 6 + n, None)
                  for layer, router_ED in enumerate(routers)), (), None, mode,
        )
        for n, mode in enumerate(step.modes)
    ]  # fmt: skip
    if _narrow(config):  # only the biases decide
        batches = [replace(batch, x=tuple(torch.zeros_like(x).to(config.dtype) for x in batch.x)) for batch in batches]
    # Forwards that do not train come before, between and after those that do.
    return {"batches": (*others[:1], *batches[:1], *others[1:], *batches[1:]), "updates": step.updates}


def _tokens(router_ED: Tensor, seed: str, positions: int, preferred: int, padding_T: Tensor | None) -> Tensor:
    """Return x (S, B, D) whose tokens mostly prefer one expert; padding prefers the expert before it."""
    g = draw.generator("tokens", seed)
    E, D = router_ED.shape
    x_TD: Tensor = torch.randn(positions * _B, D, generator=g) * D**-0.5 + _PULL * router_ED.float()[preferred % E]
    if padding_T is not None:
        x_TD[padding_T] += 3 * _PULL * router_ED.float()[(preferred - 1) % E]
    return x_TD.reshape(positions, _B, D).to(router_ED.dtype)


def _padding(padding: Padding, positions: int, rank: int, m: int) -> Tensor | None:
    """Return which tokens of a microbatch are padding, bool (T,)."""
    if padding == "none":
        return None
    padding_SB = torch.zeros(positions, _B, dtype=torch.bool)
    if padding == "end":
        padding_SB[positions - 1 - (rank + m) % 2 :] = True
    if padding == "ragged":
        for column in range(_B):
            padding_SB[1 + (2 * column + rank + m) % (positions - 1) :, column] = True
    if padding == "all" or (padding == "one rank" and rank == 0):
        padding_SB[:] = True
    return padding_SB.flatten()


CHAPTERS = (Chapter((ON_BALANCING_ROUTERS,), NAMES, scripts, quick=QUICK),)
