"""The checks: one file per chapter of the spec; each check names the requirement that it decides."""

from __future__ import annotations

if __name__ != "moe_conformance.distributed_tests":
    raise ImportError(
        "import it as moe_conformance.distributed_tests: under two names every class would be there twice"
    )
