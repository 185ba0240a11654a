"""Stored values of the oracles, and how they are written: see README.md."""

from __future__ import annotations

if __name__ != "moe_conformance.goldens":
    raise ImportError("import it as moe_conformance.goldens: under two names every class would exist twice")
