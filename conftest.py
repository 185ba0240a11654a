"""The checkout's own tests: how Hypothesis draws in self_tests. The plug-in comes by its entry point, once.

A run that judges a backend brings its own profile (moe_conformance/plugin/drawing.py), which takes the place of this.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("self", derandomize=True, database=None, deadline=None, print_blob=False)
settings.load_profile("self")
