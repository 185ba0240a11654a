"""Experts with the parameters of a new model, read before anything is written into them."""

from __future__ import annotations

from moe_conformance.engine import RankContext
from moe_conformance.scenarios.initial import InitialSurface, built_new
from moe_conformance.scenarios.sessions import Opened
from moe_conformance.workloads.records.workload import Workload


def initial_experts(kept: Opened, workload: Workload, context: RankContext) -> InitialSurface:
    """Build the experts of a new model."""
    return built_new(kept, "initial_experts", workload.config, context)


SCRIPT_SURFACES = {"initial_experts": initial_experts}
