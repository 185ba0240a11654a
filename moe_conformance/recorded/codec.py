"""Records of a run as values of JSON and tensors, and back, with every bit.

None, booleans, strings, whole and finite numbers are as in JSON, and an array is a tuple. All else is an object with
one key: a tag of `_READERS`, or the name of a frozen dataclass, `module:qualname`, with its fields that differ from
their defaults. A file names classes only out of `known_records`; no module is imported for it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_conformance import discovery
from moe_conformance.contract import Malformed, claims
from moe_conformance.engine.ledger import disagreement, entry
from moe_conformance.recorded.pools import DTYPES, BadRecording, Pools, take
from moe_conformance.scenarios import outcome

_PLAIN = (bool, int, str, type(None))


@cache
def known_records() -> Mapping[str, type]:
    """Return the records of which outcomes consist, by name: those of all ranks, and of the scenarios of chapters."""
    modules: list[ModuleType] = [outcome, entry, disagreement, claims, *discovery.modules("scenario")]
    return {
        name_of(value): value
        for module in modules
        for value in vars(module).values()
        if is_frozen(value) and value.__module__ == module.__name__
    }


def is_frozen(kind: object) -> bool:
    """Whether it is a class, and a frozen dataclass."""
    return isinstance(kind, type) and is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def name_of(kind: type) -> str:
    """Return the name of a class in a file."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _known_name(kind: type) -> str:
    if known_records().get(name_of(kind)) is not kind:
        raise BadRecording(f"{name_of(kind)} is no record of outcomes")
    return name_of(kind)


class Encoder:
    """Turns values into what JSON has, and collects their tensors."""

    def __init__(
        self, name: Callable[[type], str] = _known_name, text: Callable[[str], str] = lambda string: string
    ) -> None:
        """Take how a dataclass is named, which may refuse it, and what is stored in place of a string."""
        self.pools = Pools()
        self._name, self._text = name, text

    def encode(self, value: Any) -> Any:
        """Return a value for a document.

        Raises:
            BadRecording: it is neither data nor a known record.
        """
        kind = type(value)
        if kind is str:
            return self._text(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is tuple:
            return [self.encode(part) for part in value]
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if kind in (Tensor, torch.nn.Parameter):
            return {"tensor": self.pools.put(value)}
        if kind is list or kind is torch.Size:
            return {kind.__name__.lower(): [self.encode(part) for part in value]}
        if kind in (set, frozenset):
            return {kind.__name__: sorted((self.encode(part) for part in value), key=json.dumps)}
        if isinstance(value, Mapping):
            return {"map": [[self.encode(key), self.encode(part)] for key, part in value.items()]}
        if is_frozen(kind):
            return {self._name(kind): self._fields(value)}
        raise BadRecording(f"a value of {name_of(kind)} is no data that can be stored")

    def _fields(self, record: Any) -> dict[str, Any]:
        """Return the fields of a record that differ from their defaults: one that is added later changes nothing."""
        found = {}
        for field in fields(record):
            encoded = self.encode(getattr(record, field.name))
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if default is MISSING or not _same(encoded, self.encode(default)):
                found[field.name] = encoded
        return found


def _same(one: Any, other: Any) -> bool:
    """Whether two documents are the same one: 1, 1.0 and true are three."""
    return one == other and json.dumps(one) == json.dumps(other)


def decode(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that a document describes.

    Raises:
        BadRecording: it describes none, names a class that is no record of outcomes, or a tensor that is not there.
    """
    if type(document) in _PLAIN:
        return document
    if type(document) is float and math.isfinite(document):
        return document
    if isinstance(document, list):
        return tuple(decode(part, tensors) for part in document)
    if not isinstance(document, dict) or len(document) != 1:
        raise BadRecording(f"{_short(document)} is no value: an object has one key, its kind")
    ((kind, content),) = document.items()
    if ":" in kind:
        return _record(kind, content, tensors)
    if kind == "tensor":
        return take(tensors, content)
    if kind not in _READERS:
        raise BadRecording(f"{kind!r} is no kind of value")
    try:
        return _READERS[kind](content, tensors)
    except (TypeError, ValueError, KeyError, struct.error) as error:
        if isinstance(error, BadRecording):
            raise
        raise BadRecording(f"{_short(document)} is no value: {error}") from error


def _record(name: str, content: Any, tensors: Mapping[str, Tensor]) -> Any:
    kind = known_records().get(name)
    if kind is None:
        raise BadRecording(f"{name} is no record of outcomes; nothing else is made from a file")
    known = {field.name for field in fields(kind) if field.init}
    if not isinstance(content, dict) or not content.keys() <= known:
        raise BadRecording(f"{name} has other fields than {_short(content)}")
    try:
        return kind(**{field: decode(part, tensors) for field, part in content.items()})
    except (TypeError, ValueError, Malformed) as error:  # a field without a default is missing, or a claim is none
        if isinstance(error, BadRecording):
            raise
        raise BadRecording(f"{name} cannot be made of {_short(content)}: {error}") from error


def _parts(content: Any, tensors: Mapping[str, Tensor]) -> list[Any]:
    if not isinstance(content, list):
        raise BadRecording(f"{_short(content)} is no list of values")
    return [decode(part, tensors) for part in content]


_READERS: Mapping[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "float": lambda content, _: struct.unpack(">d", bytes.fromhex(content))[0],
    "dtype": lambda content, _: DTYPES[content],
    "list": _parts,
    "size": lambda content, tensors: torch.Size(_parts(content, tensors)),
    "set": lambda content, tensors: set(_parts(content, tensors)),
    "frozenset": lambda content, tensors: frozenset(_parts(content, tensors)),
    "map": lambda content, tensors: {
        decode(key, tensors): decode(part, tensors) for key, part in (tuple(pair) for pair in content)
    },
}


def _short(document: Any) -> str:
    text = repr(document)
    return text if len(text) <= 80 else f"{text[:77]}..."
