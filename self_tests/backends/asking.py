"""What tests of adapters ask of an adapter: a run that every rank finishes, or who refuses a config, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_conformance.backends import registry
from moe_conformance.contract import Config, Unsupported
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Workload


def prepared(backend: Any) -> Engine:
    """Return ranks that have imported the library of an adapter's class."""
    return Engine(preload=(*backend.preload, "moe_conformance.scenarios.moe_step"), environment=backend.environment)


def finished(engine: Engine, backend: str, workload: Workload) -> Outcome:
    """Run a workload, which every rank must finish."""
    outcome = moe_step(engine, backend, workload)
    assert ["ok"] * workload.layout.world == [rank.status for rank in outcome.ranks], [r.error for r in outcome.ranks]
    return outcome


def refusals(
    engine: Engine, backend: str, variant: str, layout: Layout, surface: str, fields: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Ask every rank for a surface, and return who refuses it, and why, by rank."""
    asked = (backend, layout, surface, Config(variant=variant).changed(fields))
    result = engine.run(Job(f"{__name__}:refusal", asked, layout.world, layout.groups(), deadline_s=30.0))
    assert ["ok"] * layout.world == [rank.status for rank in result.ranks], [rank.error for rank in result.ranks]
    return [rank.value for rank in result.ranks]


def refusal(context: RankContext, asked: tuple[str, Layout, str, Config]) -> tuple[str, str]:
    """On a rank: open a session, ask for a surface, and return who refuses either, and why."""
    backend, layout, surface, config = asked
    try:
        session = registry.load(backend).open(Topology(layout, context.rank, context.groups), torch.device("cpu"))
    except Unsupported as error:
        return error.by, str(error)
    try:
        getattr(session, surface)(config)
    except Unsupported as error:
        return error.by, str(error)
    finally:
        session.close()
    return "nobody", ""
