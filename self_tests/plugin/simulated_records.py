"""Records of checks that never ran."""

from __future__ import annotations

from typing import Any

from moe_conformance.report.records import Record, Verdict


def record(requirement: str, verdict: Verdict, layout: str = "ep2", message: str = "", **more: Any) -> Record:
    """Return a record of one check on `even`."""
    node = f"test_x.py::test_{requirement}[alltoall-{layout}-even]"
    return Record(
        node, "test_x", (requirement,), verdict, message, variant="alltoall", layout=layout, workload="even", **more
    )
