"""Distributes items over xdist workers: all items of a cell to one, since they share sessions and outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from moe_conformance.workloads.plan import Cell


def cell_of(nodeid: str, cells: Sequence[str]) -> str:
    """Return the cell of an item, or the node id itself if it has none; `ep2-edp2` is not taken for `ep2`."""
    parameter = nodeid.rpartition("[")[2].removesuffix("]")
    fitting = [cell for cell in cells if parameter == cell or parameter.startswith(f"{cell}-")]
    return max(fitting, key=len, default=nodeid)


def by_cell(config: Any, log: Any, cells: Sequence[Cell]) -> LoadScopeScheduling:
    """Return a scheduler that hands out whole cells."""
    names = [cell.id for cell in cells]

    class ByCell(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return cell_of(nodeid, names)

        def remove_node(self, node: Any) -> str | None:
            """Return the item that ended with its worker: xdist would run it again, and lose the next worker too."""
            units = self.assigned_work[node].values()
            crashed: str | None = None
            for unit in units:
                crashed = next((node_id for node_id, done in unit.items() if not done), None)
                if crashed is not None:
                    unit[crashed] = True
                    break
            super().remove_node(node)
            return crashed

        def _reschedule(self, node: Any) -> None:
            """Hand out work twice: a worker keeps its last item until it has another or is told that there is none."""
            super()._reschedule(node)
            super()._reschedule(node)

    return ByCell(config, log)
