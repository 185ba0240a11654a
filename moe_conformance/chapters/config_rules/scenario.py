"""Resolve settings through a backend and record its warnings; settings that it accepts run too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_conformance.contract import ConfigRules, Malformed, Settings, VersionLimit
from moe_conformance.engine import RankContext
from moe_conformance.scenarios.accepted import AcceptedSettings
from moe_conformance.scenarios.sessions import Opened, build, recorded
from moe_conformance.workloads.records.workload import Workload


@dataclass(frozen=True)
class Resolution:
    """The result of one call of `resolve`, and its warnings."""

    settings: Settings
    warned: tuple[str, ...]


class RecordedRules:
    """The surface of scripts about settings: the backend's, with its warnings in the results."""

    def __init__(self, rules: ConfigRules) -> None:
        """Keep the surface."""
        self.rules = rules
        self.resolved = getattr(rules, "resolved", {})

    def limits(self, asked: Settings) -> tuple[tuple[str, str, str | None], ...]:
        """Return the limits as plain tuples."""
        return tuple(tuple(VersionLimit(*limit)) for limit in self.rules.limits(asked))  # type: ignore[misc]

    def resolve(self, asked: Settings) -> Resolution:
        """Resolve settings, and return them with the warnings.

        Raises:
            Malformed: the backend returned something other than `Settings`.
        """
        with recorded() as warned:
            settings: Any = self.rules.resolve(asked)
        if not isinstance(settings, Settings):
            raise Malformed(f"resolve returned {type(settings).__name__}; expected Settings")
        return Resolution(settings, tuple(warned))

    def build(self, asked: Settings, layers: int) -> Any:
        """Build that many layers."""
        return self.rules.build(asked, layers)

    def change(self, built: Any, to: Settings) -> None:
        """Change the settings of built layers."""
        self.rules.change(built, to)

    def shown(self, built: Any) -> tuple[Settings, ...]:
        """Return the settings of every layer."""
        return tuple(self.rules.shown(built))


def recorded_rules(kept: Opened, workload: Workload, context: RankContext) -> RecordedRules:
    """Build the backend's object that resolves settings, wrapped to record its warnings."""
    return RecordedRules(build(kept.session, "config_rules", workload.config))


SCRIPT_SURFACES = {"config_rules": recorded_rules}
SCENARIOS = {"accepted settings": AcceptedSettings}
