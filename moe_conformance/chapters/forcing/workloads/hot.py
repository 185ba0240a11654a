"""The pinned workloads of routing forced to a hot rank, node or expert, and of strategies that must be refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, SINGLE, Chapter
from moe_conformance.workloads.records import draw, schedule
from moe_conformance.workloads.records.runs import ON_SESSION, RouterStep
from moe_conformance.workloads.records.workload import Call, Workload
from moe_conformance.workloads.selection.profiles import Profile

RUN = RouterStep(forced="hot")
DROPPING = RouterStep(forced="hot", capacity=True)
DRAWN_DROPPING = RouterStep(forced="draws", capacity=True)
EP4 = Layout(4, ep=4)
_TOKENS = (41, 26, 0, 33)  # rank r has the entry r + m modulo the length in microbatch m
_TWICE, _IN_TURN = "F0 F1 B0 B1", "F0 F1 F2 F3 B0 B1 B2 B3"


@dataclass(frozen=True)
class _Hot:
    """One workload: a strategy, and the sizes with which it is tried."""

    strategy: str
    parameter: float | None = None
    top_k: int = 2
    per_rank: int = 4  # experts
    schedule: str = "F0 B0"
    capacity: float | None = None  # factor: the router drops tokens
    tokens: tuple[int, ...] = _TOKENS


_RECIPES: Mapping[str, _Hot] = {
    "hot-rank": _Hot("worst_rank", top_k=3, schedule=_TWICE),
    "hot-rank-few-experts": _Hot("worst_rank", top_k=3, per_rank=2),  # a token needs experts of other ranks too
    "hot-expert": _Hot("one_expert", top_k=3, schedule=_TWICE),
    "hot-expert-alone": _Hot("one_expert", top_k=1),
    "hot-node": _Hot("one_node", 2.0, top_k=3, per_rank=2),
    "hot-node-few-experts": _Hot("one_node", 2.0, top_k=3, per_rank=1),
    "hot-rank-alternating": _Hot("alternating", schedule=_IN_TURN),
    "hot-rank-by-ratio": _Hot("ratio", 2.5, schedule=_TWICE),  # tokens differ in how many hot experts they have
    "hot-rank-by-ratio-of-one": _Hot("ratio", 1.0),
    "hot-rank-beyond-ratio": _Hot("ratio", 500.0, top_k=3, per_rank=3),  # more than a token's slots allow
    "hot-rank-drops": _Hot("worst_rank", top_k=3, capacity=1.0),
    "round-robin-drops-nothing": _Hot("round_robin", top_k=3, capacity=1.0),
}
# Of strategies that force logits. No rank is without tokens, on which a router may raise whatever is forced.
_DRAWN: Mapping[str, _Hot] = {
    "random-drops": _Hot("random", top_k=3, capacity=0.75, tokens=(41, 26, 7, 33)),
    "bias-drops": _Hot("biased", 2.0, capacity=1.0, tokens=(41, 26, 7, 33), schedule=_TWICE),
}
_TWO, _INCOMPLETE = "forced-by-two", "forced-without-parameter"
REFUSED: Mapping[str, tuple[tuple[tuple[str, float | None], ...], ...]] = {
    _TWO: (
        (("random", None), ("round_robin", None)),
        (("round_robin", None), ("biased", 0.5)),
        (("random", None), ("biased", 0.5)),
        (("biased", 0.5), ("biased", -0.5)),
        (("worst_rank", None), ("one_expert", None)),
        (("ratio", 2.0), ("ratio", 3.0)),
    ),
    _INCOMPLETE: ((("biased", None),), (("ratio", None),)),
}


def hot(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the routers on layouts with ep > 1; strategies of nodes where ep gives several nodes of two ranks."""
    for name, recipe in _RECIPES.items():
        if layout.ep > 1 and (recipe.strategy != "one_node" or (layout.ep > 2 and layout.ep % 2 == 0)):
            yield _workload(name, recipe, variant, layout)


def drawn(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the routers on random or biased logits that drop tokens."""
    for name, recipe in _DRAWN.items():
        yield _workload(name, recipe, variant, layout)


def _workload(name: str, recipe: _Hot, variant: str, layout: Layout) -> Workload:
    forced = ((recipe.strategy, recipe.parameter),)
    config = Config(variant, experts=recipe.per_rank * layout.ep, top_k=recipe.top_k).changed({
        "routing.forced": forced, "routing.normalise": True, "capacity.factor": recipe.capacity
    })  # fmt: skip
    microbatches = schedule.microbatches(recipe.schedule)
    batches = tuple(
        tuple(
            draw.route_batch(recipe.tokens[(rank + m) % 4], config, draw.generator(name, layout.name, m, rank), 1.0)
            for rank in range(layout.world)
        )
        for m in range(microbatches)
    )
    parameters = draw.router_parameters(config, draw.generator(name, layout.name, "router"), bias=0.0, twins=False)
    run = RUN if recipe.capacity is None else DROPPING if name in _RECIPES else DRAWN_DROPPING
    return Workload(name, run, config, layout, batches, recipe.schedule, parameters)


def refused(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield scripts that try to build routers that must be refused, several in each script."""
    for name, strategies in REFUSED.items():
        configs = [Config(variant=variant).changed({"routing.forced": forced}) for forced in strategies]
        calls = tuple(Call("router", ({"config": config},) * layout.world, may_raise=True) for config in configs)
        yield Workload(name, ON_SESSION, Config(variant=variant), layout, (), calls=calls)


CHAPTERS = (
    Chapter((RUN, DROPPING), tuple(_RECIPES), hot, quick=(EP2, EP4)),
    Chapter((DRAWN_DROPPING,), tuple(_DRAWN), drawn, quick=(SINGLE, EP2)),
    Chapter((ON_SESSION,), tuple(REFUSED), refused, quick=(EP2,)),
)
