"""Reads JSON and TOML that others wrote: whatever is in such a file, reading it returns plain data or raises one error.

A file is refused if it is no regular file, too large or nested too deeply, or if a number or a text in it cannot be
printed. `mismatch` compares what was read with a JSON Schema.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 1 << 28  # of a file; the report of a whole full profile has some 2^24
DEEPEST = 64  # containers in each other
_MOST_DIGITS = 20  # of an integer, which then becomes a float without overflow


class Unreadable(ValueError):
    """A file cannot be read, or holds what this suite never writes; the sentence says what, without the file's name."""


def json_of(path: Path, most: int = MOST_BYTES) -> Any:
    """Return what a file of JSON holds.

    Raises:
        Unreadable: it cannot be read, or is no JSON of legible numbers and texts.
    """
    return json_from(text_of(path, most))


def json_from(text: str) -> Any:
    """Return what a text of JSON holds; raises as `json_of`."""
    try:
        found = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    except ValueError as error:
        raise Unreadable(f"it is not JSON: {error}") from None
    _require_plain(found)
    return found


def toml_of(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """Return what a file of TOML holds; raises as `json_of`."""
    return toml_from(text_of(path, most))


def toml_from(text: str) -> dict[str, Any]:
    """Return what a text of TOML holds, which has numbers for infinity and NaN; raises as `json_of`."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise Unreadable(_TOO_DEEP) from None
    except ValueError as error:  # also that of an integer of thousands of digits
        raise Unreadable(f"it is not TOML: {error}") from None
    _require_plain(found, any_number=True)
    return found


def text_of(path: Path, most: int = MOST_BYTES) -> str:
    """Return the text of a regular file; raises as `json_of`. It does not wait for a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Unreadable("it is no regular file")
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > most:
        raise Unreadable(f"it is larger than {most} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is no text in UTF-8: {error.reason} at byte {error.start}") from None


_TOO_DEEP = f"it is nested more than {DEEPEST} deep"


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _require_plain(found: Any, any_number: bool = False) -> None:
    """Raise Unreadable unless the data is not too deep, and can be printed."""
    level: list[Any] = [found]
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str):
                _require_text(value)
            elif isinstance(value, (int, float)) and not any_number:
                _require_number(value)
        if not inner:
            return
        level = inner
    raise Unreadable(_TOO_DEEP)


def _require_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise Unreadable(f"{text[:40]!a} is no text: half of a character") from None


def _require_number(number: float) -> None:
    if isinstance(number, float) and not math.isfinite(number):
        raise Unreadable("a number is larger than any float")
    if isinstance(number, int) and abs(number) >= 10**_MOST_DIGITS:
        raise Unreadable(f"an integer has more than {_MOST_DIGITS} digits")


# ---- JSON Schema -----------------------------------------------------------------------------------------------------

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Return where data does not have the form of a schema, and what was expected there; None if it has.

    Of JSON Schema it knows what the schemas of this suite use: `format` is not looked at.
    """
    return next(_mismatches(value, schema, schema.get("$defs", {}), "it"), None)


def _mismatches(value: Any, schema: Mapping[str, Any], defs: Mapping[str, Any], where: str) -> Iterator[str]:
    if reference := schema.get("$ref"):
        schema = defs[reference.rpartition("/")[2]]
    if choices := schema.get("oneOf"):
        if all(next(_mismatches(value, choice, defs, where), None) for choice in choices):
            yield f"{where} has none of its forms"
        return
    if wrong := _wrong_value(value, schema):
        yield f"{where} is {_shortly(value)}, expected: {wrong}"
    elif isinstance(value, dict):
        yield from _in_object(value, schema, defs, where)
    elif isinstance(value, list) and (items := schema.get("items")) is not None:
        for number, inner in enumerate(value):
            yield from _mismatches(inner, items, defs, f"{where}[{number}]")


def _in_object(value: dict[str, Any], schema: Mapping[str, Any], defs: Mapping[str, Any], where: str) -> Iterator[str]:
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        yield f"{where} has no {missing[0]}"
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, inner in value.items():
        if wrong := _wrong_value(name, schema.get("propertyNames", {})):
            yield f"{where} has {_shortly(name)}, expected: {wrong}"
        if name in known:
            yield from _mismatches(inner, known[name], defs, f"{where}.{name}")
        elif others is False:
            yield f"{where} has {_shortly(name)}, which is unknown"
        elif isinstance(others, dict):
            yield from _mismatches(inner, others, defs, f"{where}.{_shortly(name)}")


def _wrong_value(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Return what a value should be by itself, None if it is."""
    if "const" in schema and value != schema["const"]:
        return repr(schema["const"])
    if "enum" in schema and value not in schema["enum"]:
        return f"one of {', '.join(map(str, schema['enum']))}"
    names = schema.get("type", ())
    if names and not any(_is_of(value, name) for name in ([names] if isinstance(names, str) else names)):
        return names if isinstance(names, str) else " or ".join(names)
    if isinstance(value, (int, float)) and value < schema.get("minimum", -math.inf):
        return f"at least {schema['minimum']}"
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        return f"at least {schema['minItems']} items"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return f"the form {schema['pattern']}"
    return None


def _is_of(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _shortly(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
