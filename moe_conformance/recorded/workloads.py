"""The fingerprint of a workload: it is drawn again where a recorded outcome is judged, and must be the same one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from moe_conformance.recorded.codec import Encoder
from moe_conformance.workloads.records.workload import Drawn, Workload


class _Encoder(Encoder):
    """Encodes workloads, whose records are known by their names wherever they stand in the package."""

    def __init__(self) -> None:
        super().__init__(name=lambda kind: kind.__qualname__)

    def encode(self, value: Any) -> Any:
        """Return a value for a document."""
        return super().encode(tuple(value) if isinstance(value, Drawn) else value)


def fingerprint(workload: Workload) -> str:
    """Return 32 hexadecimal digits that tell all that is in a workload.

    Options at their defaults are left out, so that a new option changes no fingerprint.
    """
    encoder = _Encoder()
    digest = hashlib.sha256(json.dumps(encoder.encode(workload)).encode())
    for dtype, content in encoder.pools.contents():
        digest.update(dtype.encode())
        digest.update(content)
    return digest.hexdigest()[:32]
