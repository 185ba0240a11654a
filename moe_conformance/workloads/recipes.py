"""The pinned workloads of the exchange, seeded and adversarial, which every backend runs on every layout.

A recipe is a name and a function that draws the batches. `corpus` applies the recipes to a variant and a layout. In
workloads whose names end in `even` every rank has the same number of tokens, for backends that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.golden import NAME as GOLDEN
from moe_conformance.workloads.golden import golden_workload
from moe_conformance.workloads.records import draw, schedule
from moe_conformance.workloads.records.covering import pairwise
from moe_conformance.workloads.records.drawn_parameters import DrawnParameters
from moe_conformance.workloads.records.model_sizes import SIZES as SIZES_OF_MODELS
from moe_conformance.workloads.records.routes import (
    Route,
    all_dropped,
    anywhere,
    dropped,
    duplicates,
    empty_expert,
    gaps,
    idle_if_odd,
    idle_rank,
    one_choice,
    one_expert,
    one_expert_if_odd,
    one_expert_in_all_slots,
    one_expert_in_all_slots_if_odd,
    one_rank,
)
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Asynchrony, Batch, Drawn, Lead, ParameterKey, Twist, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile, likened_layouts

# Tokens of rank r: the entry r modulo the length.
EVEN = (8,)
UNEVEN = (9, 4, 13, 6, 11, 5, 7, 10)
ONE_WITHOUT = (7, 0, 9, 4)
BY_TURNS = (24, 0, 1, 7)
THREES = (9, 3, 15, 0, 21)
GAPPED = (24, 8, 32, 0, 16)  # whole sequences, padding included
MANY = (160, 0, 300, 129)  # more than a byte can count, signed or not
THOUSANDS = (4100, 3, 0, 5)  # more than 4,096 on a rank


@dataclass(frozen=True)
class Recipe:
    """The name, route and options of one workload of the exchange, with the suite's or the backend's experts."""

    name: str
    route: Route = anywhere
    tokens: tuple[int, ...] = EVEN
    config: dict[str, Any] = field(default_factory=dict)
    schedule: str = "F0 B0"
    lead: Lead = "flat"
    needs_ep: bool = False  # only with ep > 1
    profile: Profile = "quick"
    experts_per_ep: int | None = None  # E = this many times ep, instead of 8
    weights: Literal["plain", "odd", "ones"] = "plain"  # odd: some are zero, some negative
    asynchrony: Asynchrony = "plain"
    memory: Literal["plain", "filled"] = "plain"
    repeated: bool = False  # all microbatches are routed alike
    wide: bool = False  # runs on layouts of more than `USUAL_RANKS` as well
    likened: Profile | None = None  # runs that must give the same are compared with it from this profile on
    alike: bool = False  # all tokens have one row of weights and one number for upstream
    turns: tuple[tuple[int, ...], ...] = ()  # in place of `tokens`: the tokens of every microbatch
    rehearsed: bool = False  # after a step with other parameters
    interleaved: bool = False  # with another of the same sizes: operations alternate

    def tokens_of(self, rank: int, microbatch: int) -> int:
        """Return T of a rank in a microbatch."""
        if self.turns:
            tokens = self.turns[microbatch]
            return tokens[rank % len(tokens)]
        return self.tokens[(rank + microbatch) % len(self.tokens)]


_INPUT = {"weights_applied": "input"}
_OUTPUT = {"weights_applied": "output"}
_TO_LARGEST = {"padding.tokens": "group_max"}
_TO_8 = {"padding.tokens": "group_max", "padding.alignment": 8}
_TO_64 = {"padding.tokens": "group_max", "padding.alignment": 64}
_TO_BOUND = {"padding.tokens": "bound", "padding.alignment": 8, "padding.bound": 13}  # the largest of UNEVEN

# Few tokens, none, one on every rank, many, an odd number: no collective may depend on this.
SIZES = ((8,), (0,), (1,), (64,), (9,))

# Above an alignment of 64 on one rank, equal to it, none, one token on one rank.
AROUND_64 = ((70, 3), (64, 0), (0,), (1, 0, 0, 0, 0, 0, 0, 0))

SIX_IN_FLIGHT = "F0 F1 F2 F3 F4 F5 B0 B5 B1 B4 B2 B3"  # backwards neither in the order of forwards nor in reverse


def _of_models() -> tuple[Recipe, ...]:
    """Return exchanges with the sizes of published models, once each, and every pair of values of other options."""
    options = {
        "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
        "tokens": (EVEN, UNEVEN, ONE_WITHOUT),
        "schedule": ("F0 B0", "F0 F1 B1 B0", SIX_IN_FLIGHT),
        "weights_applied": ("native", "input", "output"),
    }
    rows, found = pairwise(options), []
    for n, (E, K) in enumerate(SIZES_OF_MODELS):
        row = rows[n % len(rows)]
        kind = {EVEN: "even", UNEVEN: "uneven", ONE_WITHOUT: "rank-without-tokens"}[row["tokens"]]
        dtype = str(row["dtype"]).removeprefix("torch.")
        config = {"experts": E, "top_k": K, "hidden": E + 40, "dtype": row["dtype"]}
        config["weights_applied"] = row["weights_applied"]
        name = f"top-{K}-of-{E}-{kind}-{dtype}"
        found.append(Recipe(name, tokens=row["tokens"], config=config, schedule=row["schedule"], profile="full"))
    return tuple(found)


PROBE = (
    Recipe("uneven", tokens=UNEVEN, wide=True, likened="full"),
    Recipe("even", wide=True, likened="quick"),
    Recipe("top-1-even", config={"top_k": 1}),
    Recipe("top-1-uneven", tokens=UNEVEN, config={"top_k": 1}, profile="full"),
    Recipe("top-all-even", config={"top_k": 8}),
    Recipe("odd-experts-even", experts_per_ep=3, config={"hidden": 40, "top_k": 3}),
    Recipe("odd-experts-uneven", experts_per_ep=3, tokens=UNEVEN, config={"hidden": 40, "top_k": 3}, profile="full"),
    Recipe("empty-expert-even", empty_expert),
    Recipe("idle-rank-even", idle_rank, needs_ep=True),
    Recipe("idle-rank-uneven", idle_rank, tokens=UNEVEN, needs_ep=True, profile="full"),
    Recipe("one-rank-even", one_rank, needs_ep=True, wide=True),
    Recipe("one-expert-even", one_expert, config={"top_k": 1}),
    Recipe("one-expert-uneven", one_expert, tokens=UNEVEN, config={"top_k": 1}, profile="full"),
    Recipe("one-token-even", tokens=(1,), wide=True),
    Recipe("rank-without-tokens", tokens=ONE_WITHOUT, wide=True),
    # Other strides hardly leave gaps where tokens are few.
    Recipe("one-token-or-none", tokens=(8, 1, 0, 5), profile="full", likened="full"),
    Recipe("many-tokens", tokens=MANY, wide=True),
    Recipe("many-tokens-even", tokens=(140,), profile="full"),
    Recipe("many-tokens-one-expert", one_expert, tokens=MANY, config={"top_k": 1}),
    Recipe("many-experts-even", tokens=(24,), config={"experts": 64, "top_k": 10, "hidden": 256}, profile="full"),
    Recipe("thousands-of-tokens", tokens=THOUSANDS, config={"top_k": 1}),
    Recipe("all-dropped-on-a-rank", all_dropped, tokens=UNEVEN, needs_ep=True),
    Recipe("zero-and-negative-weights-even", weights="odd"),
    Recipe("dropped-even", dropped, wide=True, likened="full"),
    Recipe("all-alike-even", one_choice, likened="quick", alike=True),
    Recipe("dropped-uneven", dropped, tokens=UNEVEN, profile="full", wide=True),
    Recipe("duplicates-even", duplicates, wide=True),
    Recipe("one-expert-in-all-slots-even", one_expert_in_all_slots, config={"top_k": 3}),
    Recipe(
        "one-expert-in-all-slots-of-a-rank",
        one_expert_in_all_slots_if_odd,
        tokens=UNEVEN,
        config={"top_k": 3},
        needs_ep=True,
    ),
    Recipe("two-dims-even", lead="two_dims", wide=True),
    Recipe("three-columns-even", tokens=(9,), lead="three_columns", profile="full"),
    Recipe("three-columns-uneven", tokens=THREES, lead="three_columns", wide=True),
    Recipe("in-flight-even", schedule="F0 F1 B0 B1", wide=True),
    Recipe("in-flight-uneven", tokens=UNEVEN, schedule="F0 F1 B1 B0", wide=True),
    Recipe("three-in-flight-even", schedule="F0 F1 F2 B0 B1 B2"),
    Recipe("three-in-flight-uneven", tokens=UNEVEN, schedule="F0 F1 B0 F2 B1 B2"),
    Recipe("six-in-flight-even", config={"top_k": 3}, schedule=SIX_IN_FLIGHT),
    Recipe("one-expert-a-rank-in-flight-even", experts_per_ep=1, schedule="F0 F1 F2 B1 B0 B2"),
    Recipe("two-alive-even", schedule="F0 F1 B0 B1", interleaved=True),
    Recipe("top-5-uneven", experts_per_ep=12, tokens=UNEVEN, config={"top_k": 5, "hidden": 136}),
    Recipe("top-6-of-160-even-float16", config={"experts": 160, "top_k": 6, "hidden": 200, "dtype": torch.float16}),
    Recipe("halves-in-flight-even", schedule="D0 D1 C0 C1 B0 B1"),
    Recipe("halves-in-flight-uneven", tokens=UNEVEN, schedule="D0 D1 C1 C0 B1 B0", wide=True),
    Recipe("one-by-one-uneven", tokens=UNEVEN, schedule="F0 B0 F1 B1"),
    Recipe("forward-only-even", schedule="F0 F1 B1"),
    Recipe("filled-even", schedule="F0 B0 F1 B1", memory="filled"),
    Recipe("filled-uneven", dropped, tokens=ONE_WITHOUT, memory="filled", wide=True),
    Recipe("filled-inference-uneven", dropped, tokens=ONE_WITHOUT, schedule="F0 I1 B0 N2", memory="filled"),
    Recipe("inference-even", schedule="N0 F1 I2 B1"),
    Recipe("inference-unasked-even", schedule="U0 F1 U2 B1"),
    Recipe("inference-uneven", tokens=ONE_WITHOUT, schedule="F0 I1 B0 N2", wide=True),
    Recipe("inference-dropped-even", dropped, schedule="N0 F1 I2 B1", wide=True),
    # Nothing overlaps: for backends that hold one microbatch at a time.
    Recipe("inference-in-turn-even", schedule="N0 F1 B1 I2 U3"),
    Recipe("inference-in-turn-dropped-even", dropped, schedule="N0 F1 B1 I2 U3"),
    Recipe("inference-gaps-padded-uneven", gaps, tokens=GAPPED, config=_TO_8, schedule="F0 I1 B0 N2"),
    Recipe("by-turns-uneven", tokens=BY_TURNS, schedule="F0 B0 F1 B1 F2 B2 F3 B3", wide=True),
    Recipe(
        name="sizes-by-turns-even",
        route=one_expert_if_odd,
        turns=SIZES,
        config={"top_k": 1},
        schedule="F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ),
    Recipe("repeated-even", schedule="F0 B0 F1 B1 F2 B2 R2 R2 R2 R2", repeated=True, wide=True),
    Recipe("poisoned-in-flight-uneven", tokens=UNEVEN, schedule="F0 F1 B1 B0", asynchrony="poisoned", wide=True),
    Recipe("poisoned-even", asynchrony="poisoned"),  # for backends that need equally many tokens
    Recipe("watched-even", asynchrony="watched"),
    Recipe("poisoned-inference-even", schedule="N0 F1 I2 B1", asynchrony="poisoned"),
    Recipe("watched-in-flight-uneven", tokens=UNEVEN, schedule="F0 F1 B0 B1", asynchrony="watched"),
    Recipe("padded-uneven", tokens=UNEVEN, config=_TO_8, wide=True),
    Recipe("padded-to-largest-uneven", tokens=ONE_WITHOUT, config=_TO_LARGEST, profile="full"),
    Recipe("padded-even", config=_TO_8, profile="full"),
    Recipe("padded-dropped-uneven", dropped, tokens=ONE_WITHOUT, config=_TO_64, profile="full"),
    Recipe("padded-two-dims-uneven", tokens=(6, 2, 0, 10), lead="two_dims", config=_TO_8),
    Recipe("padded-by-turns-uneven", turns=AROUND_64, config=_TO_64, schedule="F0 B0 F1 B1 F2 B2 F3 B3", wide=True),
    Recipe("padded-in-flight-uneven", tokens=UNEVEN, config=_TO_8, schedule="F0 F1 B1 B0"),
    Recipe("padded-three-in-flight-uneven", tokens=BY_TURNS, config=_TO_8, schedule="F0 F1 B0 F2 B1 B2"),
    Recipe("padded-halves-in-flight-uneven", tokens=UNEVEN, config=_TO_8, schedule="D0 D1 C0 C1 B0 B1"),
    Recipe("padded-halves-crossed-uneven", tokens=UNEVEN, config=_TO_8, schedule="D0 D1 C1 C0 B1 B0"),
    Recipe("padded-uneven-bfloat16", tokens=UNEVEN, config={**_TO_8, "dtype": torch.bfloat16}, profile="full"),
    Recipe("padded-filled-uneven", tokens=ONE_WITHOUT, config=_TO_8, memory="filled", profile="full"),
    Recipe("gaps-uneven", gaps, tokens=GAPPED, schedule="F0 F1 B0 B1", wide=True),
    Recipe("bounded-uneven", tokens=UNEVEN, config=_TO_BOUND, wide=True),
    Recipe("bounded-aligned-uneven", tokens=UNEVEN, config={**_TO_BOUND, "padding.bound": 16}),
    Recipe("bounded-in-flight-uneven", tokens=ONE_WITHOUT, config=_TO_BOUND, schedule="F0 F1 B0 B1", profile="full"),
    Recipe("input-weights-even", config=_INPUT, wide=True),
    Recipe("output-weights-even", config=_OUTPUT),
    Recipe("hundreds-of-experts-even", config={"experts": 384, "top_k": 8, "hidden": 400}),
    Recipe("even-bfloat16", config={"dtype": torch.bfloat16}, wide=True),
    Recipe("uneven-bfloat16", tokens=UNEVEN, config={"dtype": torch.bfloat16}),
    Recipe("even-float64", config={"dtype": torch.float64}, wide=True),
    Recipe("uneven-float64", tokens=UNEVEN, config={"dtype": torch.float64}, profile="full"),
    Recipe("even-float16", config={"dtype": torch.float16}, wide=True),
    Recipe("uneven-float16", tokens=UNEVEN, config={"dtype": torch.float16}, profile="full"),
    Recipe("padded-uneven-float16", tokens=UNEVEN, config={**_TO_8, "dtype": torch.float16}, profile="full"),
    Recipe("top-all-even-float16", config={"top_k": 8, "dtype": torch.float16}, profile="full"),
    *_of_models(),
    Recipe("top-all-even-bfloat16", config={"top_k": 8, "dtype": torch.bfloat16}, profile="full"),
)

_OWN = (
    # Three slots: with two the order of addition changes nothing.
    Recipe("own-even", config={"top_k": 3}, wide=True, likened="full"),
    Recipe("own-uneven", tokens=UNEVEN, profile="full", wide=True, likened="full"),
    Recipe("own-top-all-even", config={"top_k": 8}),
    Recipe("own-one-expert-even", one_expert, config={"top_k": 1}),
    Recipe("own-empty-expert-even", empty_expert),
    Recipe("own-many-tokens-one-expert", one_expert, tokens=MANY, config={"top_k": 1}),
    Recipe("own-rehearsed-even", rehearsed=True),
    Recipe("own-unweighted-even", tokens=(24,), experts_per_ep=2, config={"top_k": 1}, weights="ones"),
    Recipe("own-idle-rank-even", idle_rank, needs_ep=True),
    Recipe("own-one-token-even", tokens=(1,), config={"top_k": 1}, needs_ep=True),
    Recipe("own-rank-without-tokens", tokens=ONE_WITHOUT, wide=True),
    Recipe("own-filled-even", memory="filled"),
    Recipe("own-filled-uneven", tokens=ONE_WITHOUT, memory="filled"),
    Recipe("own-inference-even", schedule="N0 F1 I2 B1"),
    Recipe("own-accumulated-even", schedule="F0 B0 F1 B1", wide=True, likened="full"),
    Recipe("own-in-flight-uneven", tokens=UNEVEN, schedule="F0 F1 B0 B1", wide=True, likened="full"),
    Recipe("own-forward-only-even", schedule="F0 F1 B1", profile="full"),
    Recipe("own-padded-uneven", tokens=ONE_WITHOUT, config=_TO_8, wide=True),
    Recipe("own-padded-in-flight-uneven", tokens=UNEVEN, config=_TO_64, schedule="F0 F1 B0 B1", profile="full"),
    Recipe("own-gaps-uneven", gaps, tokens=GAPPED),
    Recipe("own-bounded-uneven", tokens=UNEVEN, config=_TO_BOUND),
    Recipe("own-input-weights-even", config=_INPUT),
    Recipe("own-output-weights-even", config=_OUTPUT),
    # More than a tile of 128 columns and not a multiple of it; multiples of 8, as half-precision products need.
    Recipe("own-wide-even", experts_per_ep=3, config={"hidden": 200, "ffn": 136, "top_k": 3}),
)


def in_bfloat16(recipe: Recipe) -> Recipe:
    """Return a recipe in bfloat16, the dtype that every library offers; its twins are in the quick profile."""
    config = {**recipe.config, "dtype": torch.bfloat16}
    likened: Profile | None = "quick" if recipe.likened and "uneven" not in recipe.name else recipe.likened
    return replace(recipe, name=f"{recipe.name}-bfloat16", config=config, likened=likened)


def in_float16(recipe: Recipe) -> Recipe:
    """Return a recipe in float16, for the full profile except for one.

    No equivalent runs are compared: products below 2^-14 lose bits in float16, so that a weight times a power of two
    gives other bits.
    """
    profile: Profile = "quick" if recipe.name == "own-wide-even" else "full"
    config = {**recipe.config, "dtype": torch.float16}
    return replace(recipe, name=f"{recipe.name}-float16", config=config, likened=None, profile=profile)


EXPERTS = (
    *_OWN,
    Recipe("own-dropped-even", dropped),
    Recipe("own-inference-dropped-even", dropped, schedule="N0 F1 I2 B1"),
    Recipe("own-inference-in-turn-even", schedule="N0 F1 B1 I2 U3"),
    Recipe("own-duplicates-even", duplicates),
    Recipe("own-two-dims-even", lead="two_dims"),
    Recipe("own-poisoned-in-flight-uneven", tokens=UNEVEN, schedule="F0 F1 B1 B0", asynchrony="poisoned"),
    Recipe("own-watched-uneven", tokens=UNEVEN, asynchrony="watched"),
    Recipe("own-poisoned-even", asynchrony="poisoned"),
    Recipe("own-watched-even", asynchrony="watched"),
    # No rank has tokens, or the experts of one rank get none, between usual steps.
    Recipe("own-by-turns-even", turns=((8,), (0,), (8,)), schedule="F0 B0 F1 B1 F2 B2"),
    Recipe(
        "own-idle-by-turns-even", idle_if_odd, turns=((8,), (7,), (8,)), schedule="F0 B0 F1 B1 F2 B2", needs_ep=True
    ),
    Recipe("own-two-alive-uneven", tokens=UNEVEN, schedule="F0 F1 B0 B1", interleaved=True),
    Recipe("own-three-in-flight-even", schedule="F0 F1 F2 B0 B1 B2"),
    Recipe("own-six-in-flight-even", config={"top_k": 3}, schedule=SIX_IN_FLIGHT),
    Recipe("own-dozen-experts-uneven", experts_per_ep=12, tokens=UNEVEN, config={"top_k": 5}),
    Recipe("own-odd-experts-even", experts_per_ep=3, config={"hidden": 40, "ffn": 24, "top_k": 3}),
    # In bfloat16 too: some libraries' experts compute in it whatever the tokens are, and are judged there.
    *(in_bfloat16(experts_recipe) for experts_recipe in _OWN),
    *(in_float16(experts_recipe) for experts_recipe in _OWN),
    Recipe("own-uneven-float64", tokens=UNEVEN, config={"dtype": torch.float64}, wide=True),
    Recipe(
        name="own-unweighted-even-float64",
        tokens=(24,),
        experts_per_ep=2,
        config={"top_k": 1, "dtype": torch.float64},
        weights="ones",
    ),
    Recipe("own-even-float64", config={"dtype": torch.float64}, wide=True, likened="quick"),
)


def corpus(
    variant: str, layout: Layout, profile: Profile, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[Workload]:
    """Yield the exchange workloads of a variant on a layout: with the probe expert, then with the backend's experts.

    Only workloads whose names are `wanted` are drawn.

    Raises:
        GoldenError: the golden is missing, or differs from its digest.
    """
    for run, recipes in ((ExchangeStep(), PROBE), (ExpertsStep(), EXPERTS)):
        for recipe in (candidate for candidate in recipes if wanted(candidate.name)):
            if (profile == "quick" and recipe.profile == "full") or (recipe.needs_ep and layout.ep == 1):
                continue
            if recipe.asynchrony != "plain" and layout.world == 1:  # nothing is sent
                continue
            if layout.world > USUAL_RANKS and not recipe.wide:
                continue
            workload = exchange_workload(recipe, run, variant, layout)
            yield replace(workload, likened=profile) if _likened(recipe, run, layout, profile) else workload
    golden = golden_workload(variant, layout) if wanted(GOLDEN) else None
    if golden is not None:
        yield golden


def _likened(recipe: Recipe, run: ExchangeStep | ExpertsStep, layout: Layout, profile: Profile) -> bool:
    """Return whether runs that must give the same results are compared with a recipe's run on a layout.

    In the quick profile few exchanges are on layouts with etp: one recipe, for which variants take turns.
    """
    if recipe.likened not in ("quick", profile) or layout not in likened_layouts(profile):
        return False
    return profile == "full" or isinstance(run, ExpertsStep) or layout.etp == 1 or recipe.alike


def exchange_workload(recipe: Recipe, run: ExchangeStep | ExpertsStep, variant: str, layout: Layout) -> Workload:
    """Draw the workload of a recipe for a variant on a layout."""
    beside: tuple[Workload, ...] = ()
    if recipe.interleaved:
        other = replace(recipe, name=f"{recipe.name}, the other", interleaved=False)
        beside = (exchange_workload(other, run, variant, layout),)
    config = Config(variant=variant).changed(recipe.config)
    few = "experts" not in recipe.config and config.experts < 2 * layout.ep  # so that two slots may go to one rank
    if recipe.experts_per_ep or config.experts % layout.ep or few:
        E = (recipe.experts_per_ep or 3) * layout.ep
        config = replace(config, experts=E, top_k=min(config.top_k, E))
    microbatches = schedule.microbatches(recipe.schedule)

    def turn(microbatch: int) -> int:
        return 0 if recipe.repeated else microbatch

    tokens = tuple(tuple(recipe.tokens_of(r, turn(m)) for r in range(layout.world)) for m in range(microbatches))

    def batch(microbatch: int, rank: int) -> Batch:
        generator = draw.generator(recipe.name, layout.name, turn(microbatch), rank)
        ids_TK = recipe.route(tokens[microbatch][rank], config, layout, generator)
        if isinstance(run, ExchangeStep):
            batch = draw.probe_batch(rank, microbatch, ids_TK, config, generator, odd=recipe.weights == "odd")
            return draw.alike(batch) if recipe.alike else batch
        real = draw.real_batch(ids_TK, config, generator)
        return replace(real, weights_TK=torch.ones_like(real.weights_TK)) if recipe.weights == "ones" else real

    def experts() -> dict[ParameterKey, Tensor]:
        return draw.expert_parameters(config, draw.generator(recipe.name, layout.name, "experts"))

    return Workload(
        recipe.name,
        run,
        config,
        layout,
        Drawn(tokens, batch),
        recipe.schedule,
        DrawnParameters(experts) if isinstance(run, ExpertsStep) else {},
        recipe.lead,
        recipe.asynchrony,
        recipe.memory,
        twist=Twist(rehearsed=recipe.rehearsed, beside=beside, interleaved=recipe.interleaved),
    )
