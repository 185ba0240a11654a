"""Has a build write moe_conformance/contract/assembled.pyi first, so that type checkers see what chapters add."""

from __future__ import annotations

import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Stubs(BuildHookInterface):  # type: ignore[type-arg]
    """Writes the file, whether a wheel or an editable install is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write it into the tree that is built."""
        sys.path.insert(0, self.root)
        from tools.stubs import main

        main()
