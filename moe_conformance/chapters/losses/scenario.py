"""Build the routers of a model with losses for scripts, in which every call is a training step."""

from __future__ import annotations

from moe_conformance.contract import Unsupported
from moe_conformance.engine import RankContext
from moe_conformance.scenarios.sessions import Opened, build
from moe_conformance.scenarios.training import TrainedRouters
from moe_conformance.workloads.records.workload import Workload


def trained_routers(kept: Opened, workload: Workload, context: RankContext) -> TrainedRouters:
    """Build the routers, and the trainer that runs their steps.

    Raises:
        Unsupported: the routers take no padding mask, and the steps have padding.
    """
    surface = build(kept.session, "training_routers", workload.config)
    given = [call.given[context.rank] for call in workload.calls]
    padded = any(batch.padding_T is not None for call in given for batch in call.get("batches", ()))
    if padded and not getattr(surface, "takes_mask", True):
        raise Unsupported("these routers take no padding mask")
    return TrainedRouters(surface, kept.session)


SCRIPT_SURFACES = {"training_routers": trained_routers}
