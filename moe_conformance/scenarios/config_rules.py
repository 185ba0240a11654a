"""Settings that a backend resolves, with what it warned of meanwhile."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moe_conformance.contract import Malformed
from moe_conformance.surfaces import ConfigRules, Settings, VersionLimit


@dataclass(frozen=True)
class Resolution:
    """What one call of `resolve` returned, and its warnings."""

    settings: Settings
    warned: tuple[str, ...]


class RecordedRules:
    """The surface of a backend; its warnings are part of the answers."""

    def __init__(self, rules: ConfigRules) -> None:
        """Keep the surface."""
        self.rules = rules
        self.resolved = getattr(rules, "resolved", {})

    def limits(self, asked: Settings) -> tuple[tuple[str, str, str | None], ...]:
        """Return the limits as plain tuples."""
        return tuple(tuple(VersionLimit(*limit)) for limit in self.rules.limits(asked))  # type: ignore[misc]

    def resolve(self, asked: Settings) -> Resolution:
        """Resolve them under a recorder of warnings.

        Raises:
            Malformed: it returned something else than `Settings`.
        """
        with _recorded() as warned:
            settings: Any = self.rules.resolve(asked)
        if not isinstance(settings, Settings):
            raise Malformed(f"resolve returned {type(settings).__name__}; expected Settings")
        return Resolution(settings, tuple(warned))

    def build(self, asked: Settings, layers: int) -> Any:
        """Build layers."""
        return self.rules.build(asked, layers)

    def change(self, built: Any, to: Settings) -> None:
        """Change them."""
        self.rules.change(built, to)

    def shown(self, built: Any) -> tuple[Settings, ...]:
        """Return the settings of every layer."""
        return tuple(self.rules.shown(built))


class _Heard(logging.Handler):
    """Keeps the messages of warnings and worse."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        self.into.append(record.getMessage())


@contextmanager
def _recorded() -> Iterator[Sequence[str]]:
    """Yield a list that has, in the end, what was warned of inside."""
    said: list[str] = []
    heard = _Heard(said)
    root = logging.getLogger()
    root.addHandler(heard)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(each.message) for each in caught]
    finally:
        root.removeHandler(heard)
