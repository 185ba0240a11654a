"""The pinned workloads of the proxy model: two blocks, each with a dense part and an MoE layer, on every layout.

It is computed in float64, so that a wrong result is not mistaken for rounding. The selection of experts is unambiguous:
seeds are tried until all tokens in all blocks have a margin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.reference.groups import proxy_model
from moe_conformance.reference.groups.proxy_model import ModelGradients
from moe_conformance.reference.shared_experts.whole_layer import Weighing
from moe_conformance.workloads import layers as shared_experts
from moe_conformance.workloads.chapter import EP2_EDP2, TP2_EP2, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.workload import Batch, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import Profile

BLOCKS = 2
MARGIN = 2.0**-14  # in selection scores; the error of float32 is 2^-10 of that
MIX = 24  # H of the dense part
_MOST_RANKS = 8


@dataclass(frozen=True)
class ProxyModelStep:
    """The run of a training step of the proxy model."""

    scenario: ClassVar[str] = "proxy model"

    def __str__(self) -> str:
        """Return `proxy model`."""
        return "proxy model"


@dataclass(frozen=True)
class ProxyRecipe:
    """The name and options of one workload of the model."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    even: bool = True
    microbatches: int = 2


PROXIES = (
    ProxyRecipe("proxy-even"),
    ProxyRecipe("proxy-uneven", even=False),
    ProxyRecipe("proxy-shared-even", {"shared.ffn": (24,), "shared.gate": True}, microbatches=1),
)
NAMES = tuple(recipe.name for recipe in PROXIES)


def proxies(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of a variant on a layout whose pp divides the number of blocks."""
    if layout.world <= _MOST_RANKS and BLOCKS % layout.pp == 0:
        yield from (proxy_workload(recipe, variant, layout) for recipe in PROXIES)


def proxy_workload(recipe: ProxyRecipe, variant: str, layout: Layout) -> Workload:
    """Draw the workload of a recipe for a variant on a layout; it is the same for all variants."""
    workload = _clear(recipe.name, layout)
    return replace(workload, config=replace(workload.config, variant=variant))


@lru_cache(maxsize=64)  # more than a layout has
def _clear(name: str, layout: Layout) -> Workload:
    recipe = next(proxy for proxy in PROXIES if proxy.name == name)
    config = Config(experts=max(4, 2 * layout.ep), dtype=torch.float64, hidden=16, ffn=12)
    config = config.changed(recipe.config)
    for seed in count():
        workload = _drawn(recipe, config, layout, draw.generator(recipe.name, layout.name, seed))
        if solved(workload).margin > MARGIN:
            return workload
    raise AssertionError("count() does not end")


def solved(workload: Workload) -> ModelGradients:
    """Return the oracle's outputs and gradients of the model, sequence by sequence; see `sequences`."""
    config = workload.config
    xs, dys = [], []
    for m, ranks, last in sequences(workload):
        xs.append(torch.cat([workload.batches[m][rank].x_TD for rank in ranks]))
        dys.append(torch.cat([workload.batches[m][rank].upstream for rank in last]))
    blocks = [
        {
            (name.removeprefix(f"block{b}/"), expert): value
            for (name, expert), value in workload.parameters.items()
            if name.startswith(f"block{b}/")
        }
        for b in range(BLOCKS)
    ]
    return proxy_model.gradients(
        xs, dys, blocks, config.top_k, Weighing(config.routing.score, config.routing.normalise, config.routing.scale)
    )


def sequences(workload: Workload) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield every sequence: its microbatch, the ranks of the first stage that hold it, in order, those of the last."""
    layout = workload.layout
    groups = layout.groups()
    stages = list(zip(*groups["pp"], strict=True))
    tp_of = {rank: ranks for ranks in groups["tp"] for rank in ranks}
    pp_of = {rank: ranks for ranks in groups["pp"] for rank in ranks}
    for m in range(len(workload.batches)):
        for chunks in groups["cp"]:
            if chunks[0] in stages[0] and tp_of[chunks[0]][0] == chunks[0]:
                ranks = tuple(rank for chunk in chunks for rank in tp_of[chunk])
                yield m, ranks, tuple(pp_of[rank][-1] for rank in ranks)


def _drawn(recipe: ProxyRecipe, config: Config, layout: Layout, generator: torch.Generator) -> Workload:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    D, parameters = config.hidden, dict[ParameterKey, Tensor]()
    for b in range(BLOCKS):
        drawn = shared_experts.layer_parameters(config, generator)
        drawn["mix_in", None], drawn["mix_out", None] = normal(MIX, D) * D**-0.5, normal(D, MIX) * MIX**-0.5
        parameters |= {(f"block{b}/{name}", expert): value for (name, expert), value in drawn.items()}
    place = {rank: ranks[0] for ranks in layout.groups()["pp"] for rank in ranks}
    none = torch.empty(0, 0)

    def batch(m: int, rank: int) -> Batch:
        T = 6 if recipe.even else (7, 4, 9, 3, 5, 8, 2, 6)[(place[rank] + m) % 8]
        return Batch(normal(T, D), none.long(), none, normal(T, D))

    batches = tuple(tuple(batch(m, rank) for rank in range(layout.world)) for m in range(recipe.microbatches))
    return Workload(recipe.name, ProxyModelStep(), config, layout, batches, "", parameters)


CHAPTERS = (Chapter((ProxyModelStep(),), NAMES, proxies, "every", (EP2_EDP2, TP2_EP2)),)
