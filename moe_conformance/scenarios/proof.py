"""Decide whether a refusal with `by="library"` was in fact raised by the library."""

from __future__ import annotations

import dis
from types import FrameType, TracebackType
from typing import Literal

from moe_conformance.contract import Unsupported

_OURS = "moe_conformance.backends."
_SLIPS = (AttributeError, NameError, IndexError, KeyError)  # what a mistake of the adapter raises in C


def refused_by(error: Unsupported, backend: object) -> Literal["library", "adapter"]:
    """Return "library" if the refusal is proved, else "adapter".

    A refusal is proved if its `__cause__` is an exception that the library raised: the innermost frame of that is not
    in the adapter, or calls something that is not written in Python. `Backend.library_modules` names
    the modules of the library where these are the adapter's own, as in a file that holds both.
    """
    if error.by != "library" or error.__cause__ is None:
        return "adapter"
    last = _innermost(error.__cause__.__traceback__)
    if last is None:
        return "adapter"
    frame, at = last
    module = str(frame.f_globals.get("__name__", ""))
    if any(_within(module, name) for name in getattr(backend, "library_modules", ())):
        return "library"
    if not _within(module, _adapter(backend)):
        return "adapter" if _within(module, "moe_conformance") and not module.startswith(_OURS) else "library"
    called = not _raises(frame, at) and not isinstance(error.__cause__, _SLIPS)
    return "library" if called else "adapter"


def _adapter(backend: object) -> str:
    """Return the module of the adapter, or its package if it is in moe_conformance.backends."""
    module = type(backend).__module__
    return _OURS + module.removeprefix(_OURS).partition(".")[0] if module.startswith(_OURS) else module


def _within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def _innermost(traceback: TracebackType | None) -> tuple[FrameType, int] | None:
    """Return the frame in which an exception was raised, and the offset of the instruction."""
    last = None
    while traceback is not None:
        last = traceback.tb_frame, traceback.tb_lasti
        traceback = traceback.tb_next
    return last


def _raises(frame: FrameType, at: int) -> bool:
    """Return whether an instruction is a `raise` or an `assert`, and not a call."""
    found = next(
        (instruction.opname for instruction in dis.get_instructions(frame.f_code) if instruction.offset == at), ""
    )
    return found.startswith(("RAISE", "RERAISE"))
