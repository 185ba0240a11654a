"""What a script calls: a surface of the backend, of which the rank brings back records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from moe_conformance.contract import Claims, Named, Parametrised, Read, Resolved
from moe_conformance.scenarios.reported import claims_of


class _Built(Parametrised, Resolved, Protocol):
    """A surface with parameters that says what it resolved to."""


_Surface = TypeVar("_Surface", bound=_Built)


class ScriptSurface(Generic[_Surface]):
    """A surface whose windows, claims and resolved settings are passed on as they are."""

    def __init__(self, surface: _Surface) -> None:
        """Keep the surface."""
        self.surface = surface

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the surface resolved to."""
        return self.surface.resolved

    @property
    def claims(self) -> Claims:
        """What the surface claims."""
        return claims_of(self.surface)

    def named(self, read: Read) -> Iterator[Named]:
        """Yield the windows of the surface."""
        return self.surface.named(read)
