"""Collect what the surface.py of every chapter adds to the contract.

`Sections` has the sections of `Config`, `ClaimsPart` the fields of `Claims`, `SessionPart` the methods of `Session`;
every public name of a surface.py is exported here, and so by `contract`. Type checkers read assembled.pyi,
which `python -m tools.stubs` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType
from typing import Any

from moe_conformance.discovery import modules

_PARTS = ("SECTIONS", "ClaimsPart", "SessionPart")


def _surfaces() -> Iterator[ModuleType]:
    """Yield the module surface.py of every chapter that has one.

    Raises:
        ImportError: one of them was imported before `contract`, so that its names are not defined yet.
    """
    for module in modules("surface"):
        if getattr(module.__spec__, "_initializing", False):
            raise ImportError(f"import the names of {module.__name__} from moe_conformance.contract")
        yield module


def _public(module: ModuleType) -> dict[str, Any]:
    """Return the public classes and types that a surface.py defines, by name."""
    names = [name for name in vars(module) if not name.startswith("_") and name not in _PARTS]
    public = {name: vars(module)[name] for name in names}
    return {
        name: value
        for name, value in public.items()
        if getattr(value, "__module__", module.__name__) == module.__name__
    }


_found = tuple(_surfaces())
_options = {name: kind for module in _found for name, kind in getattr(module, "SECTIONS", {}).items()}
Sections = make_dataclass(
    "Sections", [(name, kind, field(default=kind())) for name, kind in _options.items()], frozen=True, kw_only=True
)
ClaimsPart = dataclass(frozen=True)(
    type("ClaimsPart", tuple(part.ClaimsPart for part in _found if hasattr(part, "ClaimsPart")), {})
)
SessionPart = type("SessionPart", tuple(part.SessionPart for part in _found if hasattr(part, "SessionPart")), {})
Sections.__module__ = ClaimsPart.__module__ = SessionPart.__module__ = __name__

__all__ = ["ClaimsPart", "Sections", "SessionPart"]
for _module in _found:
    for _name, _value in _public(_module).items():
        globals()[_name] = _value
        __all__ += [_name]
