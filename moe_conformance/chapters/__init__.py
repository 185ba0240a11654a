"""Chapters of the spec: a folder each, with all that is of one chapter alone. None imports another.

spec.toml       the requirements
surface.py      what a backend may offer for it: section of `Config`, protocols, claims
workloads       the pinned workloads that its checks read
scenario        what ranks run for it, beside steps and scripts of calls
judge           what its checks call

What two chapters need is in `contract`, `workloads`, `scenarios` and `judging`. `moe_conformance.discovery` finds them.
"""

from __future__ import annotations

import moe_conformance.contract  # noqa: F401  # it imports every surface.py, and has to come first
