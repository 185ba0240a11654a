"""A cache key for workloads that have the same data, whatever their variant."""

from __future__ import annotations

from dataclasses import fields, replace

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records.workload import Workload


class Drawn:
    """A workload as a cache key; workloads with the same drawn data are equal, whatever the variant."""

    def __init__(self, workload: Workload) -> None:
        """Compute the key of a workload."""
        self.workload = workload  # kept alive, so that no other object gets an id() that is in the key
        config = replace(workload.config, variant="")
        values = [getattr(workload, field.name) for field in fields(workload) if field.name != "config"]
        self._key = (config, *(value if isinstance(value, (str, frozenset, Layout)) else id(value) for value in values))

    def __hash__(self) -> int:
        """Return the hash of the key."""
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same drawn data."""
        return isinstance(other, Drawn) and self._key == other._key
