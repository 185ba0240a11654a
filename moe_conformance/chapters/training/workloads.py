"""Scripts of a few training steps of a small model: AdamW with clipping, SGD, accumulation, a gradient not finite.

Numbers of counted tokens differ between ranks, microbatches and steps; in step s expert s has no token in any layer.
Nothing is nearly a tie: a token that parameters of the next steps would send elsewhere is not there. In bfloat16 there
is one step: rounding of its gradient leaves the update, and so all later steps, unknown within about their own size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config, Training, TrainingBatch
from moe_conformance.contract.topology import Layout
from moe_conformance.goldens import stored_values
from moe_conformance.goldens.chapters.training import keyed
from moe_conformance.reference.training.model import Parameters, layers_of, outputs
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, SINGLE, TP2_EP2, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import Profile

ON_TRAINER = Script("trainer")

_CHAPTER = "training"  # of the golden
_E, _D, _F, _TOKENS = 8, 16, 12, 6
_CLEAR = 0.25  # in bfloat16: least difference of logits between a token's last selected expert and the next
_FLAG, _SHY = 2.0, 12.0  # x of step s has _FLAG in column s, and the router of expert s has -_SHY / _FLAG there
QUICK = (SINGLE, EP2, EP2_EDP2, TP2_EP2)


@dataclass(frozen=True)
class Recipe:
    """The steps and options of one script."""

    name: str
    training: Training
    steps: int = 2
    microbatches: int = 2
    not_finite: int | None = None  # the step in which a target of the last rank is infinite
    seed: int = 0
    layouts: tuple[Layout, ...] = QUICK  # in the quick profile; elsewhere other scripts show the same
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


_ADAMW = Training(epsilon=1e-4, decay=0.1, largest_norm=0.5)
_SGD = Training(optimiser="sgd", rate=0.05, decay=0.1)
_BFLOAT16 = {"dtype": torch.bfloat16, "ffn": 24}  # a multiple of 8, as torch's grouped matmul needs it
_NARROW = (SINGLE, EP2, EP2_EDP2)
_RECIPES = (
    Recipe("train-adamw", _ADAMW, steps=4),
    Recipe("train-sgd", _SGD, layouts=(EP2, TP2_EP2)),
    Recipe("train-sgd-clipped", Training(optimiser="sgd", rate=0.05, largest_norm=0.5), layouts=(EP2, EP2_EDP2)),
    Recipe("train-sgd-four-microbatches", _SGD, steps=1, microbatches=4, layouts=(SINGLE, EP2)),
    Recipe("train-adamw-sharded", replace(_ADAMW, sharded_state=True), steps=4, seed=1, layouts=(EP2_EDP2,)),
    Recipe("train-not-finite", Training(decay=0.1, largest_norm=0.5), steps=3, not_finite=1, layouts=(SINGLE, EP2)),
    Recipe("train-bfloat16", Training(), steps=1, layouts=_NARROW, options=_BFLOAT16),
    Recipe("train-clipped-bfloat16", Training(largest_norm=0.5), steps=1, layouts=_NARROW, options=_BFLOAT16),
)
NAMES = tuple(recipe.name for recipe in _RECIPES)
GOLDEN = "train-golden"


def scripts(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield all scripts on layouts with one pipeline stage, whose dense parameters divide over tp.

    The golden is in the full profile only: its twenty steps take long, and decide what the other scripts decide.
    """
    if layout.pp > 1 or _F % layout.tp or _E % layout.ep or _F % layout.etp:
        return
    for recipe in _RECIPES:
        if profile == "full" or layout in recipe.layouts:
            yield script(recipe.name, layout).through(variant)
    if profile == "full" and (stored := golden_script(layout)) is not None:
        yield stored.through(variant)


@lru_cache(maxsize=64)
def script(name: str, layout: Layout) -> Workload:
    """Return the script of a recipe."""
    recipe = next(each for each in _RECIPES if each.name == name)
    config = _config(recipe)

    def given(step: int, rank: int) -> tuple[TrainingBatch, ...]:
        return tuple(_batch(recipe, layout, step, m, rank) for m in range(recipe.microbatches))

    calls = tuple(
        Call("step", tuple({"batches": given(step, rank)} for rank in range(layout.world)))
        for step in range(recipe.steps)
    )
    return Workload(name, ON_TRAINER, config, layout, (), parameters=_parameters(recipe, config), calls=calls)


def _config(recipe: Recipe) -> Config:
    return Config(experts=_E, hidden=_D, ffn=_F, training=recipe.training).changed(recipe.options)


def _parameters(recipe: Recipe, config: Config) -> dict[ParameterKey, Tensor]:
    g = draw.generator(recipe.name, "parameters", recipe.seed)
    drawn, F = dict[ParameterKey, Tensor](), config.ffn
    for number in range(config.training.dense_layers + config.training.layers):
        dense = number < config.training.dense_layers
        for e in (None,) if dense else range(config.experts):
            for name, size in (("gate", (F, _D)), ("up", (F, _D)), ("down", (_D, F))):
                drawn[f"layer{number}/{name}", e] = torch.randn(size, generator=g) * size[1] ** -0.5 / 2
        if not dense:
            router_ED = torch.randn(config.experts, _D, generator=g) * _D**-0.5
            for step in range(recipe.steps):
                router_ED[:, step] = 0.0
                router_ED[step, step] = -_SHY / _FLAG
            drawn[f"layer{number}/router", None] = router_ED
    return {key: value.to(config.dtype) for key, value in drawn.items()}


def _batch(recipe: Recipe, layout: Layout, step: int, m: int, rank: int) -> TrainingBatch:
    """Return a microbatch of a rank: all ranks of a tp group have equally many tokens, and those of dp have not."""
    group, dtype = rank // layout.tp, _config(recipe).dtype
    g = draw.generator(recipe.name, "tokens", recipe.seed, layout.name, step, m, rank)
    T = _TOKENS + (group + m) % 3
    x_TD = torch.randn(T, _D, generator=g)
    x_TD[:, : recipe.steps] = 0.0
    x_TD[:, step] = _FLAG
    if dtype == torch.bfloat16:
        pool_TD, first = _pool(recipe), (rank * recipe.microbatches + m) * (_TOKENS + 2)
        x_TD = pool_TD[torch.arange(first, first + T) % len(pool_TD)]
    target_TD = torch.randn(T, _D, generator=g).to(dtype)
    counted_T = torch.arange(T) % 3 != (rank + m) % 3
    counted_T[T - 2 * ((group + m + step) % 3) :] = False  # 0, 2 or 4 of the last ones
    if step == recipe.not_finite and rank == layout.world - 1 and m == 0:
        target_TD[int(counted_T.nonzero()[0]), 0] = torch.inf
    return TrainingBatch(x_TD, target_TD, counted_T)


@lru_cache(maxsize=64)
def golden_script(layout: Layout) -> Workload | None:
    """Return the stored trajectory as a script, the same tokens on all layouts; None where they cannot be divided.

    Raises:
        GoldenError: the golden is missing, or differs from its digest.
    """
    stored = stored_values.read(stored_values.folder(), _CHAPTER)
    own = {name.split("/")[2]: value for name, value in stored.items() if "/in/" in name}
    (steps, T, D), (E, F, _) = own["x_STD"].shape, own["gate-1"].shape
    if layout.pp > 1 or T % (2 * layout.world) or E % layout.ep or F % layout.tp or F % layout.etp:
        return None
    rate, beta1, beta2, epsilon, decay, largest = (
        own[name].item() for name in ("rate", "beta1", "beta2", "epsilon", "decay", "largest_norm")
    )
    training = Training(rate=rate, betas=(beta1, beta2), epsilon=epsilon, decay=decay, largest_norm=largest)
    config = Config(experts=E, top_k=int(own["top_k"]), hidden=D, ffn=F, training=training)
    calls = tuple(
        Call("step", tuple({"batches": _of_golden(own, step, layout.world, rank)} for rank in range(layout.world)))
        for step in range(steps)
    )
    parameters = {key: value.float() for key, value in keyed(own).items()}
    return Workload(GOLDEN, ON_TRAINER, config, layout, (), parameters=parameters, calls=calls, golden=_CHAPTER)


def _of_golden(own: Mapping[str, Tensor], step: int, world: int, rank: int) -> tuple[TrainingBatch, ...]:
    """Return two microbatches of a rank."""
    places = torch.arange(own["x_STD"].shape[1]).chunk(2 * world)[2 * rank : 2 * rank + 2]
    x_TD, target_TD, counted_T = own["x_STD"][step].float(), own["target_STD"][step].float(), own["counted_ST"][step]
    return tuple(TrainingBatch(x_TD[at], target_TD[at], counted_T[at].bool()) for at in places)


@lru_cache(maxsize=8)
def _pool(recipe: Recipe) -> Tensor:
    """Return tokens of the first step in bfloat16, of which none is nearly tied, for all ranks and microbatches."""
    config = _config(recipe)
    x_TD = torch.randn(512, _D, generator=draw.generator(recipe.name, "pool", recipe.seed)).to(config.dtype)
    x_TD[:, : recipe.steps] = 0.0
    x_TD[:, 0] = _FLAG
    return _clear(x_TD, _parameters(recipe, config), config.top_k)


def _clear(x_TD: Tensor, parameters: Parameters, top_k: int) -> Tensor:
    """Return those tokens that are not nearly tied in any MoE layer."""
    for number, layer in enumerate(layers_of(parameters)):
        if ("router", None) in layer:
            before = {key: value for key, value in parameters.items() if int(key[0][5 : key[0].index("/")]) < number}
            logits_TE = outputs(x_TD, before, top_k) @ layer["router", None].double().T
            best_T = logits_TE.topk(top_k + 1).values
            x_TD = x_TD[best_T[:, -2] - best_T[:, -1] > _CLEAR]
    return x_TD


CHAPTERS = (Chapter((ON_TRAINER,), (*NAMES, GOLDEN), scripts, variants="every", quick=QUICK),)
