"""Where the tests of native's flex variants play: ranks, a token exchange, a batch that differs on every rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native import Native
from moe_conformance.backends.native.fused.token_exchange import TokenExchange
from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.engine import Engine, Job, RankContext, RankResult
from moe_conformance.engine.ledger.entry import Entry

EP4, EP2_ETP2 = Layout(4, ep=4), Layout(4, ep=2, etp=2)
E, K, D = 8, 3, 5
TOKENS = (4, 0, 7, 2)  # of ranks 0 to 3


def on_ranks(
    engine: Engine, act: Callable[[Scene], Any], layout: Layout = EP4, payload: Any = None
) -> list[RankResult]:
    """Run a function of a test module on the ranks of a layout."""
    scene = (act.__module__, act.__name__, layout, payload)
    job = Job(f"{__name__}:run_scene", scene, layout.world, layout.groups(), deadline_s=30.0)
    return list(engine.run(job).ranks)


def values(results: list[RankResult]) -> list[Any]:
    """What the ranks returned, once all have."""
    assert [] == [rank.error for rank in results if rank.error]
    return [rank.value for rank in results]


@dataclass(frozen=True)
class Scene:
    """What a function finds on its rank."""

    context: RankContext
    topology: Topology
    payload: Any

    @property
    def exchange(self) -> TokenExchange:
        """Over all ranks of ep and etp."""
        return TokenExchange(self.topology.group("ep_etp"), E, self.topology.sizes["etp"])

    def flex(self, variant: str, **config: Any) -> Any:
        """The flex exchange of native."""
        return (
            Native()
            .open(self.topology, self.context.device)
            .exchange(Config(variant, experts=E, hidden=D, top_k=K).changed(config))
        )

    def batch(self, seed: int = 0, tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x, ids with some empty slots, and weights; other ones on every rank."""
        draw = torch.Generator().manual_seed(100 * seed + self.context.rank)
        T = TOKENS[self.context.rank] if tokens is None else tokens
        ids_TK = torch.stack([torch.randperm(E, generator=draw)[:K] for _ in range(T)] or [torch.empty(K)])[:T].long()
        ids_TK[torch.rand(T, K, generator=draw) < 0.2] = -1
        return torch.randn(T, D, generator=draw), ids_TK, torch.rand(T, K, generator=draw)


def run_scene(context: RankContext, payload: Any) -> Any:
    """Build the scene on a rank and play it."""
    module, name, layout, inner = payload
    act = getattr(importlib.import_module(module), name)
    return act(Scene(context, Topology(layout, context.rank, context.groups), inner))


def rows_calls(entries: tuple[Entry, ...]) -> list[Entry]:
    """The calls that carried rows of width D."""
    return [entry for entry in entries if entry.shapes_in and entry.shapes_in[0][-1:] == (D,)]


def caught(act: Callable[[], Any]) -> str:
    """The type and message of what is raised."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
