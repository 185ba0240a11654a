"""What bugs have in common that put other values in the place of those that were asked for."""

from __future__ import annotations

from moe_conformance.backends.native.config_rules import ConfigRules
from moe_conformance.contract import Settings


class Changing(ConfigRules):
    """Puts other values in the place of some before anything is tested, and resolves to these."""

    def opened(self, asked: Settings) -> Settings:
        """Ask for other values where overlap is asked for."""
        return super().opened(self.instead(asked) if asked.overlap else asked)

    def instead(self, s: Settings) -> Settings:
        """Return what is asked for instead."""
        raise NotImplementedError
