"""Find a backend by the name of its entry point, or by dotted path."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from moe_conformance.contract import Backend

ENTRY_POINTS = "moe_conformance.backends"


class NoBackend(LookupError):
    """There is no such backend, or it is not a backend; the message says what to write instead."""


def names() -> list[str]:
    """Names of all installed backends, sorted."""
    return sorted(_points())


def load(name: str) -> Backend:
    """Return a backend by entry-point name or `pkg.mod:Class`.

    The library under test is not imported here: that is for `Backend.versions` and `Backend.open`.

    Raises:
        NoBackend: the name is unknown, its module does not import, or what it names is no backend.
    """
    found = _resolve(name)
    backend = found() if isinstance(found, type) else found
    missing = [part for part in ("name", "variants", "versions", "limits", "open") if not hasattr(backend, part)]
    if missing:
        raise NoBackend(
            f"{name} is no backend: it lacks {', '.join(missing)}; moe_conformance/contract says what one has"
        )
    return backend  # type: ignore[return-value]  # the attributes of the protocol were just looked up


@cache  # hundreds of virtual ranks ask in one process
def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _resolve(name: str) -> object:
    module_name, colon, attribute = name.partition(":")
    points = _points()
    if not colon and name not in points:
        module, _, last = name.rpartition(".")
        hint = f"; did you mean {module}:{last}?" if module else "; or write pkg.mod:Class"
        raise NoBackend(f"unknown backend {name!r}; known: {', '.join(sorted(points)) or 'none'}{hint}")
    try:
        if not colon:
            return points[name].load()
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        return found
    except ImportError as error:
        raise NoBackend(f"backend {name!r}: its module does not import ({error})") from error
    except AttributeError as error:
        raise NoBackend(f"backend {name!r}: module {module_name} has no {attribute}") from error
