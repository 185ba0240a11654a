"""The backend's exchange and experts with all optional shortcuts, and with none.

Tokens are routed round robin, as the config says: a token goes to all experts of one rank, and all experts get equally
many. A forward without gradients comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2_EDP2, SINGLE, Chapter
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Batch, Drawn, Twist, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

OPTIONAL = ExpertsStep(option="optional")
_HELD, _TOKENS = 2, (8, 6, 4, 6)  # experts per rank, equal to K; tokens of rank r modulo 4
_NAMES = {"own-with-shortcuts": False, "own-without-shortcuts": True}  # whether optional parts are hidden
# The same where nothing is said of the routing, for libraries that have no forced routing.
_UNSAID = {"own-with-optional-parts": False, "own-without-optional-parts": True}


def draw_all(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workload with optional parts, and the one without."""
    del profile
    if layout.world <= USUAL_RANKS:
        for name, hidden in _NAMES.items():
            yield _workload(name, hidden, variant, layout, (("round_robin", None),))


def draw_unsaid(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads whose config has no forced routing."""
    del profile
    if layout.world <= USUAL_RANKS:
        for name, hidden in _UNSAID.items():
            yield _workload(name, hidden, variant, layout, ())


def _workload(name: str, hidden: bool, variant: str, layout: Layout, forced: tuple[Any, ...]) -> Workload:
    options = {"experts": _HELD * layout.ep, "top_k": _HELD, "routing.forced": forced}
    config = Config(variant=variant).changed(options)
    tokens = tuple(tuple(_TOKENS[(rank + m) % 4] for rank in range(layout.world)) for m in range(2))

    def batch(m: int, rank: int) -> Batch:
        ids_TK = draw.in_turn(tokens[m][rank], config)
        return draw.real_batch(ids_TK, config, draw.generator("optional", layout.name, m, rank))

    parameters = draw.expert_parameters(config, draw.generator("optional", layout.name, "experts"))
    twist = Twist(without_optional=hidden)
    return Workload(name, OPTIONAL, config, layout, Drawn(tokens, batch), "N0 F1 B1", parameters, twist=twist)


CHAPTERS = (
    Chapter((OPTIONAL,), tuple(_NAMES), draw_all, quick=(SINGLE, EP2_EDP2)),
    Chapter((OPTIONAL,), tuple(_UNSAID), draw_unsaid, "every", quick=(SINGLE,)),
)
