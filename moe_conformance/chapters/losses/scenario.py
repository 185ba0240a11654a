"""Build the routers of a model with losses for scripts, in which every call is a training step."""

from __future__ import annotations

from moe_conformance.engine import RankContext
from moe_conformance.scenarios.sessions import Opened, build
from moe_conformance.scenarios.training import TrainedRouters
from moe_conformance.workloads.records.workload import Workload


def trained_routers(kept: Opened, workload: Workload, context: RankContext) -> TrainedRouters:
    """Build the routers, and the trainer that runs their steps."""
    return TrainedRouters(build(kept.session, "training_routers", workload.config), kept.session)


SCRIPT_SURFACES = {"training_routers": trained_routers}
