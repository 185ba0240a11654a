"""Which workloads are of the same drawn data: an oracle's answer to one of them is its answer to all."""

from __future__ import annotations

from dataclasses import fields, replace

from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records.workload import Workload


class Drawn:
    """A workload as a key: all that are of the same drawn data, whatever the variant, are one."""

    def __init__(self, workload: Workload) -> None:
        """Take what the key is made of."""
        self.workload = workload  # kept, so that nothing else gets the identities that the key has
        config = replace(workload.config, variant="")
        values = [getattr(workload, field.name) for field in fields(workload) if field.name != "config"]
        self._key = (config, *(value if isinstance(value, (str, frozenset, Layout)) else id(value) for value in values))

    def __hash__(self) -> int:
        """Of the key."""
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        """Whether both are of the same drawn data."""
        return isinstance(other, Drawn) and self._key == other._key
