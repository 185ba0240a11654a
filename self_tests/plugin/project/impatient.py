"""A pytest plug-in for which two cases are many: what happens after many hangs is seen without waiting for them."""

from __future__ import annotations

from moe_conformance.plugin import stopping

stopping.MOST_HANGS = 2
