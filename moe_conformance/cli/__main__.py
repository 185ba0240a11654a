"""`python -m moe_conformance.cli`."""

from __future__ import annotations

from moe_conformance.cli import main

main()
