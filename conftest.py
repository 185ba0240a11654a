"""The checkout's own tests: pytester for self_tests. The plug-in itself comes by its entry point, once."""

from __future__ import annotations

pytest_plugins = ("pytester",)
