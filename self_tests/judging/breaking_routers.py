"""Ways to run simulated routers with something broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.scenarios.outcome import Outcome, RankOutcome
from self_tests.judging.simulated_routers import Formula, route_workload, simulate_routers

BIASED: dict[str, Any] = {"routing.score": "sigmoid", "routing.balance_bias": True}
GROUPED: dict[str, Any] = {**BIASED, "experts": 16, "top_k": 4, "routing.groups": (4, 2), "routing.normalise": True}


def run(formula: Formula | None = None, layout: Layout | None = None, **fields: Any) -> Outcome:
    """Run routers, float32 unless said otherwise."""
    return simulate_routers(route_workload(layout, **fields), formula)


def edit_ranks(outcome: Outcome, change: Callable[[RankOutcome], RankOutcome]) -> Outcome:
    """Change what every rank brought back."""
    return replace(outcome, ranks=tuple(map(change, outcome.ranks)))


def choosing(by: Callable[[Tensor, Tensor, Config], Tensor]) -> Formula:
    """Choose the K highest of some other scores."""
    return Formula(
        choose=lambda scores_TE, bias_E, config: by(scores_TE.detach(), bias_E, config).topk(config.top_k, 1).indices
    )


def weighing(change: Callable[[Tensor, Tensor, Config], Tensor]) -> Formula:
    """Weigh by another formula, given scores, ids and config."""
    return Formula(weigh=change)


def present(value: Tensor | None) -> Tensor:
    """Refuse an absent tensor."""
    assert value is not None
    return value
