"""Run a load meter, and write into the ids of the passes when they have run, as callers that reuse buffers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_conformance.contract import LoadMeter, MeteredPass, MeteredResults
from moe_conformance.engine import RankContext
from moe_conformance.scenarios.sessions import Opened, build
from moe_conformance.workloads.records.workload import Workload


class _Reusing:
    """A meter whose caller reuses the ids of passes: in everything else it is the meter itself."""

    def __init__(self, meter: LoadMeter) -> None:
        self._meter = meter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meter, name)

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Run the passes; then all their slots are of expert 0."""
        results = self._meter.run(passes)
        for metered in passes:
            if metered.ids_TK is not None:
                metered.ids_TK.zero_()
        return results


def load_meter(kept: Opened, workload: Workload, context: RankContext) -> Any:
    """Build the meter."""
    del context
    meter = build(kept.session, "load_meter", workload.config)
    return _Reusing(meter) if "reused buffers" in workload.shows else meter


SCRIPT_SURFACES = {"load_meter": load_meter}
