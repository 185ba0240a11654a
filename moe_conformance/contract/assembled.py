"""What the chapters of the spec add to the contract, found in their surface.py.

`Sections` has the sections of `Config`, `ClaimsPart` the fields of `Claims`, `SessionPart` the methods of `Session`;
every public name of a surface.py is a name of this module too, and so of `contract`. Type checkers read assembled.pyi,
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
    """Yield every surface.py.

    Raises:
        ImportError: one of them is being imported by itself: its names are not there yet.
    """
    for module in modules("surface"):
        if getattr(module.__spec__, "_initializing", False):
            raise ImportError(f"import the names of {module.__name__} from moe_conformance.contract")
        yield module


def _public(module: ModuleType) -> dict[str, Any]:
    """Return the classes and types of a surface.py by name."""
    names = [name for name in vars(module) if not name.startswith("_") and name not in _PARTS]
    own = {name: vars(module)[name] for name in names}
    return {name: each for name, each in own.items() if getattr(each, "__module__", module.__name__) == module.__name__}


_found = tuple(_surfaces())
_options = {name: kind for module in _found for name, kind in getattr(module, "SECTIONS", {}).items()}
Sections = make_dataclass(
    "Sections", [(name, kind, field(default=kind())) for name, kind in _options.items()], frozen=True, kw_only=True
)
ClaimsPart = dataclass(frozen=True)(
    type("ClaimsPart", tuple(each.ClaimsPart for each in _found if hasattr(each, "ClaimsPart")), {})
)
SessionPart = type("SessionPart", tuple(each.SessionPart for each in _found if hasattr(each, "SessionPart")), {})
Sections.__module__ = ClaimsPart.__module__ = SessionPart.__module__ = __name__

__all__ = ["ClaimsPart", "Sections", "SessionPart"]
for _module in _found:
    for _name, _value in _public(_module).items():
        globals()[_name] = _value
        __all__ += [_name]
