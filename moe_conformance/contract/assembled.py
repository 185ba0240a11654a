"""Collect what the surface.py of every chapter adds to the contract.

`Sections` has the sections of `Config`, `ClaimsPart` the fields of `Claims`, `SessionPart` the methods of `Session`;
every public name of a surface.py is exported here, and so by `contract`. Type checkers read assembled.pyi,
which `python -m tools.stubs` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType
from typing import Any, get_origin

from moe_conformance.discovery import modules, registered


def _surfaces() -> Iterator[ModuleType]:
    """Yield every surface.py.

    Raises:
        ImportError: one of them is being imported by itself: its names are not there yet.
    """
    for module in modules("surface"):
        if getattr(module.__spec__, "_initializing", False):
            raise ImportError(f"import the names of {module.__name__} from moe_conformance.contract")
        yield module


def _public(module: ModuleType) -> dict[str, Any]:
    """Return by name the classes that a surface.py defines, and its type aliases; without the parts joined here."""
    found = {name: each for name, each in vars(module).items() if not name.startswith("_") and name not in PARTS}
    return {name: each for name, each in found.items() if _is_own(each, module) or get_origin(each) is not None}


def _is_own(value: object, module: ModuleType) -> bool:
    return isinstance(value, type) and value.__module__ == module.__name__


def bases(part: str, surfaces: tuple[ModuleType, ...]) -> tuple[type, ...]:
    """Return the classes of that name of all surfaces, to derive one class from.

    Raises:
        ImportError: two of them define the same attribute, of which one would hide the other.
    """
    seen: dict[str, str] = {}
    found = [(each.__name__, vars(each)[part]) for each in surfaces if part in vars(each)]
    for name, kind in found:
        attributes = {each for each in {*vars(kind), *kind.__annotations__} if not each.startswith("_")}
        if twice := sorted(attributes & seen.keys()):
            raise ImportError(f"{part} of {name} and of {seen[twice[0]]} both define {', '.join(twice)}")
        seen.update(dict.fromkeys(attributes, name))
    return tuple(kind for _, kind in found)


PARTS = ("ClaimsPart", "SessionPart")
SURFACES = tuple(_surfaces())

Sections = make_dataclass(
    "Sections",
    [(name, kind, field(default=kind())) for name, kind in registered("surface", "SECTIONS").items()],
    frozen=True,
    kw_only=True,
)
ClaimsPart = dataclass(frozen=True)(type("ClaimsPart", bases("ClaimsPart", SURFACES), {}))
SessionPart = type("SessionPart", bases("SessionPart", SURFACES), {})
Sections.__module__ = ClaimsPart.__module__ = SessionPart.__module__ = __name__

_names = {name: value for module in SURFACES for name, value in _public(module).items()}
globals().update(_names)
__all__ = ["ClaimsPart", "Sections", "SessionPart", *_names]
