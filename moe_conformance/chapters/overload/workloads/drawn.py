"""Draw the passes of a load meter on every rank, and turn steps of passes into the calls of a script.

Every rank has other tokens, and another number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config, MeteredPass
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import Script
from moe_conformance.workloads.records.workload import Call, Twist, Workload

EXPERTS, TOP_K, HIDDEN = 8, 2, 4
METER = Script("load_meter")
_CONFIG = Config(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN)

Passes = tuple[MeteredPass, ...]
Step = Callable[["Drawn"], Passes]  # the passes of one rank
Lead = Callable[[int], tuple[int, ...]]  # the leading dims of T tokens


def flat(tokens: int) -> tuple[int, ...]:
    """Return the leading dimensions (T,) of tokens."""
    return (tokens,)


def in_two(tokens: int) -> tuple[int, ...]:
    """Return the leading dimensions (S, B) of tokens, with B = 2."""
    return tokens // 2, 2


class Drawn:
    """Draws the passes of one rank, with its tokens and the layers of its pipeline stage."""

    def __init__(self, name: str, rank: int, layout: Layout, config: Config = _CONFIG) -> None:
        """Seed the generators of a rank; where tokens are copied all ranks of a tp group draw the same."""
        first = min(next(ranks for ranks in layout.groups()["tp"] if rank in ranks)) if config.token_copies else rank
        self.config = config
        self.rank, self.layout = first, layout
        self.generator = draw.generator(f"{name}-{first}")
        self.values = draw.generator(f"{name}-{first}-values")
        self.stage = next(ranks.index(rank) for ranks in layout.groups()["pp"] if rank in ranks)
        self.layers = (2 * self.stage, 2 * self.stage + 1)

    def ids(self, tokens: int | None = None, *, within: int | None = None) -> Tensor:
        """Return ids (T, K) of distinct experts for every token, all below `within`."""
        T = int(torch.randint(1, 12, (), generator=self.generator)) if tokens is None else tokens
        below = self.config.experts if within is None else within
        return torch.rand(T, below, generator=self.generator).argsort(1)[:, : self.config.top_k]

    def forward(
        self,
        layer: int,
        microbatch: int,
        kind: str = "forward",
        ids_TK: Tensor | None = None,
        padding_T: Tensor | None = None,
        lead: Lead = flat,
        *,
        recomputed: bool = False,
    ) -> MeteredPass:
        """Return a forward pass; in odd microbatches all tokens go to the first experts, one more than K."""
        few = self.config.top_k + 1 if microbatch % 2 else None
        ids_TK = self.ids(within=few) if ids_TK is None else ids_TK
        padding_T = torch.zeros(len(ids_TK), dtype=torch.bool) if padding_T is None else padding_T
        x = torch.randn(*lead(len(ids_TK)), self.config.hidden, generator=self.values).to(self.config.dtype)
        return MeteredPass(
            kind,  # type: ignore[arg-type]
            layer,
            microbatch,
            ids_TK,
            padding_T,
            x,
            torch.rand(ids_TK.shape, generator=self.values),
            torch.randn(x.shape, generator=self.values).to(x.dtype) if kind == "forward" else None,
            recomputed,
        )

    def block(self, microbatch: int, *, recomputed: Sequence[int] = ()) -> tuple[Passes, Passes]:
        """Return the forwards and backwards of one microbatch through the stage, with some layers recomputed."""
        forwards = tuple(
            self.forward(layer, microbatch, recomputed=i in recomputed) for i, layer in enumerate(self.layers)
        )
        return forwards, tuple(MeteredPass("backward", layer, microbatch) for layer in reversed(self.layers))


def one(ids: Callable[[Drawn], Tensor]) -> Step:
    """Return a step of one forward and its backward."""
    return lambda drawn: (
        drawn.forward(drawn.layers[0], 0, ids_TK=ids(drawn)),
        MeteredPass("backward", drawn.layers[0]),
    )


def nothing(drawn: Drawn) -> Passes:
    """Return a step without passes."""
    return ()


@dataclass(frozen=True)
class Recipe:
    """One script: steps, each of which ends in a report, and switches of the meter between them."""

    steps: Sequence[Step | bool]
    config: Mapping[str, Any] = field(default_factory=dict)  # options by name
    may_raise: bool = False  # whether reports may raise
    stages: int = 1  # least number of pipeline stages
    beside: Sequence[Step] = ()  # steps of another meter in the same processes
    shows: tuple[str, ...] = ()


def workload(name: str, recipe: Recipe, variant: str, layout: Layout) -> Workload:
    """Return the script of a recipe; the steps of another meter are drawn from other generators."""
    config = _CONFIG.changed({"variant": variant, **recipe.config})
    beside = [Recipe(recipe.beside, recipe.config)] if recipe.beside else []
    return Workload(
        name,
        METER,
        config,
        layout,
        (),
        calls=_calls(name, recipe, layout, config),
        twist=Twist(beside=tuple(workload(f"{name} beside", other, variant, layout) for other in beside)),
        shows=frozenset(recipe.shows),
    )


def _calls(name: str, recipe: Recipe, layout: Layout, config: Config) -> tuple[Call, ...]:
    ranks = [Drawn(name, rank, layout, config) for rank in range(layout.world)]
    calls: list[Call] = []
    for number, step in enumerate(recipe.steps):
        if isinstance(step, bool):
            calls.append(Call("switch", tuple({"on": step} for _ in ranks)))
        else:
            calls.append(Call("run", tuple({"passes": step(drawn)} for drawn in ranks)))
            calls.append(Call("report", tuple({"number": 10 + number} for _ in ranks), may_raise=recipe.may_raise))
    return tuple(calls)
