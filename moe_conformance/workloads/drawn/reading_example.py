"""Read a drawn workload from JSON, and check everything before a tensor is made or a rank is used.

Fields, sizes, shapes, the schedule, and that the dtype can represent every number: a workload that passes is one that a
strategy could have drawn, so that a failure is the backend's fault.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from moe_conformance import reading
from moe_conformance.contract import Config, RoutingOptions
from moe_conformance.contract.topology import Layout
from moe_conformance.reference.routing import selection
from moe_conformance.workloads.drawn.example import ASKED, DTYPES, FORMAT, KINDS
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.draw import weight_dtype
from moe_conformance.workloads.records.schedule import BEGIN_TRAINING, FORWARD_ALONE, LETTERS
from moe_conformance.workloads.records.workload import COLUMNS, Asynchrony, Batch, ParameterKey, Workload

T = TypeVar("T")

_FIELDS = (
    "format", "kind", "layout", "config", "schedule", "lead", "asynchrony", "parameters", "batches",
)  # fmt: skip
_LARGEST_FILE = 1 << 24  # bytes
_LARGEST = {"world": 512, "experts": 512, "top_k": 512, "hidden": 4096, "ffn": 4096}
_MOST_TOKENS, _MOST_MICROBATCHES, _LONGEST_SCHEDULE = 1024, 8, 64


class BadExample(ValueError):
    """The file does not hold a valid workload; the message says where it is wrong."""


def load(path: Path) -> Workload:
    """Read a workload from a file.

    Raises:
        BadExample: the file cannot be read, is too large, or holds no workload.
    """
    return from_json(_content(path)["workload"])


def backend_of(path: Path) -> str:
    """Return the name of the backend that failed on the example in a file.

    Raises:
        BadExample: the file cannot be read, is too large, or names none.
    """
    said = _content(path)["said"]
    backend = said.get("backend") if isinstance(said, dict) else None
    return backend if isinstance(backend, str) and backend else _bad("said.backend", backend)


def _content(path: Path) -> Mapping[str, Any]:
    try:
        data = reading.json_of(path, _LARGEST_FILE)
    except reading.Unreadable as error:
        raise BadExample(str(error)) from error
    return _object(data, "the file", ("said", "workload"))


def from_json(data: object) -> Workload:
    """Return the workload that `example.to_json` wrote.

    Raises:
        BadExample: it is not valid; the message says where.
    """
    top = _object(data, "the workload", _FIELDS)
    if top["format"] != FORMAT:
        raise BadExample(f"its format is {top['format']!r}; this version reads format {FORMAT}")
    kind = _one_of(top["kind"], "kind", tuple(KINDS.values()))
    run = next(run for run, name in KINDS.items() if name == kind)
    layout = _layout(top["layout"])
    config = _config(top["config"], kind, layout)
    batches = _batches(top["batches"], kind, config, layout)
    schedule = _schedule(top["schedule"], len(batches))
    parameters = _parameters(top["parameters"], kind, config)
    lead = _one_of(top["lead"], "lead", tuple(COLUMNS))
    if any(len(batch.x_TD) % COLUMNS[lead] for ranks in batches for batch in ranks):
        raise BadExample(f"lead: the tokens of a rank do not fill {COLUMNS[lead]} columns")
    asynchrony = _one_of(top["asynchrony"], "asynchrony", get_args(Asynchrony))
    return Workload("replayed", run, config, layout, batches, schedule, parameters, lead, asynchrony)


def _layout(data: object) -> Layout:
    names = tuple(field.name for field in fields(Layout))
    given = _object(data, "layout", names)
    layout = Layout(**{name: _whole(given[name], f"layout.{name}", 1, _LARGEST["world"]) for name in names})
    if layout.problem:
        raise BadExample(f"layout: {layout.problem}")
    try:
        tags.part(0, layout.etp)
    except ValueError as error:
        raise BadExample(f"layout: {error}") from error
    return layout


def _config(data: object, kind: str, layout: Layout) -> Config:
    given = dict(_object(data, "config", ASKED))
    if not isinstance(given["variant"], str):
        raise BadExample("config.variant is not a string")
    for name in ("experts", "top_k", "hidden", "ffn"):
        _whole(given[name], f"config.{name}", 1, _LARGEST[name])
    for name in ("routing.normalise", "routing.balance_bias"):
        _one_of(given[name], f"config.{name}", (False, True))
    choices = get_type_hints(Config) | {
        f"routing.{name}": hint for name, hint in get_type_hints(RoutingOptions).items()
    }
    for name in ("weights_applied", "routing.score", "routing.group_score"):
        _one_of(given[name], f"config.{name}", get_args(choices[name]))
    given["routing.scale"] = _number(given["routing.scale"], "config.routing.scale")
    given["dtype"] = _dtype(given["dtype"], "config.dtype")
    if given["routing.groups"] is not None:
        groups = _list(given["routing.groups"], "config.routing.groups", 2)
        given["routing.groups"] = tuple(_whole(n, "config.routing.groups", 1, 512) for n in groups)
    config = Config().changed(given)
    if kind == "probe" and config.experts % layout.ep:
        raise BadExample(f"config: {config.experts} experts cannot be divided among ep = {layout.ep}")
    try:  # the oracle checks the groups
        limit: Any = {"groups": config.routing.groups, "group_score": config.routing.group_score}
        selection.select(torch.zeros(1, config.experts), top_k=config.top_k, **limit)
    except ValueError as error:
        raise BadExample(f"config: {error}") from error
    return config


_NEXT: Mapping[str, frozenset[str]] = {  # what may follow on a microbatch
    "": BEGIN_TRAINING | FORWARD_ALONE,
    "dispatch": frozenset({"combine"}),
    "forward": frozenset({"backward"}),
    "combine": frozenset({"backward"}),
}


def _schedule(data: object, microbatches: int) -> str:
    """Return a schedule after checking that every microbatch has one forward, then at most one backward."""
    items = data.split(" ") if isinstance(data, str) and len(data) <= _LONGEST_SCHEDULE else _bad("schedule", data)
    state = dict.fromkeys(map(str, range(microbatches)), "")
    for item in items:
        name = LETTERS.get(item[:1], "")
        if name not in _NEXT.get(state.get(item[1:], "no microbatch"), ()):
            raise BadExample(f"schedule: {item!r} cannot stand where it does")
        state[item[1:]] = name
    if waiting := [m for m, last in state.items() if last in ("", "dispatch")]:
        raise BadExample(f"schedule: microbatch {waiting[0]} does not go forward")
    return " ".join(items)


def _parameters(data: object, kind: str, config: Config) -> dict[ParameterKey, Tensor]:
    E, D = config.experts, config.hidden
    forms = {"router": ((E, D), config.dtype), "balance_bias": ((E,), torch.float32)}
    names = [] if kind == "probe" else ["router", *(["balance_bias"] if config.routing.balance_bias else [])]
    given = _object(data, "parameters", names)
    return {(name, None): _tensor(given[name], f"parameters.{name}", *forms[name]) for name in names}


def _batches(data: object, kind: str, config: Config, layout: Layout) -> tuple[tuple[Batch, ...], ...]:
    given = _list(data, "batches")
    if not 1 <= len(given) <= _MOST_MICROBATCHES:
        raise BadExample(f"batches holds {len(given)} microbatches; 1 to {_MOST_MICROBATCHES} can run")
    return tuple(
        tuple(
            _batch(entry, f"batches[{m}][{rank}]", kind, config, (m, rank))
            for rank, entry in enumerate(_list(ranks, f"batches[{m}]", layout.world))
        )
        for m, ranks in enumerate(given)
    )


def _batch(data: object, where: str, kind: str, config: Config, place: tuple[int, int]) -> Batch:
    given = _object(data, where, ("x", "ids", "weights", "upstream"))
    x = _object(given["x"], f"{where}.x", ("dtype", "shape", "values"))
    shape = _list(x["shape"], f"{where}.x.shape", 2)
    T, E, D = _whole(shape[0], f"{where}.x.shape", 0, _MOST_TOKENS), config.experts, config.hidden
    K = config.top_k if kind == "probe" else 0  # the router decides
    wide = weight_dtype(config.dtype)
    upstream = ((T, D), config.dtype) if kind == "probe" else ((T, E), wide)
    batch = Batch(
        x_TD=_tensor(x, f"{where}.x", (T, D), config.dtype),
        ids_TK=_tensor(given["ids"], f"{where}.ids", (T, K), torch.int64),
        weights_TK=_tensor(given["weights"], f"{where}.weights", (T, K), wide if K else torch.float32),
        upstream=_tensor(given["upstream"], f"{where}.upstream", *upstream),
    )
    if bool(((batch.ids_TK < -1) | (batch.ids_TK >= E)).any()):
        raise BadExample(f"{where}.ids: an id is neither -1 nor one of {E} experts")
    if kind == "probe" and not torch.equal(batch.x_TD, _tagged(place, batch.x_TD, where)):
        raise BadExample(f"{where}.x: these are not the tags of its tokens, by which the judge knows them")
    return batch


def _tagged(place: tuple[int, int], x_TD: Tensor, where: str) -> Tensor:
    m, rank = place
    try:
        return tags.encode(rank, m, len(x_TD), x_TD.shape[1], x_TD.dtype)
    except ValueError as error:
        raise BadExample(f"{where}.x: {error}") from error


# ---- plain values ----------------------------------------------------------------------------------------------


def _tensor(data: object, where: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    given = _object(data, where, ("dtype", "shape", "values"))
    if given["shape"] != list(shape):
        raise BadExample(f"{where} has the shape {given['shape']!r}; {list(shape)} fits")
    if _dtype(given["dtype"], f"{where}.dtype") != dtype:
        raise BadExample(f"{where} has the dtype {given['dtype']}; {str(dtype).removeprefix('torch.')} fits")
    values = _list(given["values"], f"{where}.values", math.prod(shape))
    if dtype == torch.int64:
        for value in values:
            _whole(value, where, -1, 1 << 31)
        return torch.tensor(values, dtype=dtype).reshape(shape)
    exact = torch.tensor([_number(value, where) for value in values], dtype=torch.float64).reshape(shape)
    tensor = exact.to(dtype)
    if not torch.equal(tensor.double(), exact):
        raise BadExample(f"{where} holds a number that {given['dtype']} does not have")
    return tensor


def _object(data: object, where: str, names: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise BadExample(f"{where} is not an object")
    if odd := sorted(set(names) ^ set(data)):
        raise BadExample(f"{where} has fields that are missing or unknown: {', '.join(map(repr, odd))}")
    return data


def _list(data: object, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(data, list):
        raise BadExample(f"{where} is not a list")
    if length is not None and len(data) != length:
        raise BadExample(f"{where} has {len(data)} entries; {length} fit")
    return data


def _whole(value: object, where: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadExample(f"{where}: {value!r} is not a whole number from {least} to {most}")
    return value


def _number(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise BadExample(f"{where}: {value!r} is not a finite number")
    return float(value)


def _one_of(value: T, where: str, choices: Sequence[T]) -> T:
    if value not in choices or type(value) is not type(choices[0]):
        _bad(where, value)
    return value


def _dtype(value: object, where: str) -> torch.dtype:
    return DTYPES[value] if isinstance(value, str) and value in DTYPES else _bad(where, value)


def _bad(where: str, value: object) -> NoReturn:
    raise BadExample(f"{where}: {value!r} is none that there is")
