"""What a backend offers on a rank: each surface is built with a small config, and with each option changed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from moe_conformance.backends.registry import load
from moe_conformance.contract import Config, Session, Unsupported
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import RankContext
from moe_conformance.scenarios.proof import refused_by
from moe_conformance.scenarios.sessions import build, opened

# Surfaces that read options, and for each option that a backend may map a value other than its default.
WITH_OPTIONS = ("exchange", "router", "layer")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "top_k = 1": {"top_k": 1},
    "experts = 6": {"experts": 6},
    "bfloat16": {"dtype": torch.bfloat16},
    "weights_applied": {"weights_applied": "input"},
    "token_copies": {"token_copies": True},
    "wire = float8": {"wire": "float8"},
    "routing.score = sigmoid": {"routing.score": "sigmoid"},
    "routing.normalise": {"routing.normalise": True},
    "routing.scale": {"routing.scale": 2.5},
    "routing.groups": {"routing.groups": (2, 1)},
    "gate_bias": {"gate_bias": True},
    "router_dtype": {"router_dtype": torch.float64},
    "jitter": {"jitter": 0.25},
    "routing.balance_bias": {"routing.balance_bias": True},
    "routing.forced": {"routing.forced": (("round_robin", None),)},
    "shared.ffn": {"shared.ffn": (16,)},
    "capacity.factor": {"capacity.factor": 1.5},
    "capacity.padded": {"capacity.factor": 1.5, "capacity.padded": True},
    "padding.tokens": {"padding.tokens": "group_max"},
    "padding.packed": {"padding.packed": True},
    "padding.row_multiple": {"padding.row_multiple": 4},
    "padding.splits": {"padding.splits": "equal"},
    "receive_buffer.factor": {"receive_buffer.factor": 8.0},
}

# A library's own gate may be one of these alone; a router or a layer is tried with each, the plain config first.
_GSHARD = {"capacity.factor": 1.0, "capacity.drop_policy": "position"}
GATES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "routing.normalise": {"routing.normalise": True},
    "routing.score = softmax_topk": {"routing.score": "softmax_topk"},
    "routing.score = sigmoid": {"routing.score": "sigmoid"},
    "routing.score = sigmoid, normalise": {"routing.score": "sigmoid", "routing.normalise": True},
    "top_k = 1": {"top_k": 1},
    "capacity.factor = 1, drop_policy = position, normalise": {**_GSHARD, "routing.normalise": True},
    "capacity.factor = 1, drop_policy = position, top_k = 1": {**_GSHARD, "top_k": 1},
}

How = Literal["offered", "refused", "not adapted", "failed"]


@dataclass(frozen=True)
class Asked:
    """What a rank is to try."""

    backend: str
    variant: str
    layout: Layout


@dataclass(frozen=True)
class Offer:
    """How the building of a surface ended on one rank; `option` is "" where no option is changed."""

    surface: str
    option: str
    how: How
    reason: str = ""
    gate: str = ""  # of `GATES`, with which it was built


def names() -> tuple[str, ...]:
    """Return the names of all surfaces: the methods of a session that take a config."""
    methods = inspect.getmembers(Session, inspect.isfunction)
    return tuple(name for name, method in methods if "config" in inspect.signature(method).parameters)


def run(context: RankContext, asked: Asked) -> tuple[Offer, ...]:
    """Build every surface, and those that read options with each of them; of one that is not offered, only the first.

    What the session itself refuses when it is opened is told of a surface named "session".
    """
    try:
        session = opened(context, asked.backend, asked.layout).session
    except Unsupported as error:
        return (Offer("session", "", _refusal(error, asked), str(error)),)
    plain = Config(variant=asked.variant)
    found = []
    for surface in names():
        offer, config = _first(session, surface, plain, asked)
        found.append(offer)
        if offer.how == "offered" and surface in WITH_OPTIONS:
            tried = ((option, config.changed(values)) for option, values in OPTIONS.items())
            found += [_try(session, surface, option, changed, asked) for option, changed in tried]
    return tuple(found)


def _first(session: Any, surface: str, plain: Config, asked: Asked) -> tuple[Offer, Config]:
    """Build a surface with the plain config, or with the first gate that it takes; that of the plain one if none."""
    first = _try(session, surface, "", plain, asked)
    for gate, values in GATES.items() if surface in ("router", "layer") and first.how == "not adapted" else ():
        offer = _try(session, surface, "", plain.changed(values), asked)
        if offer.how == "offered":
            return replace(offer, gate=gate), plain.changed(values)
    return first, plain


def _try(session: Any, surface: str, option: str, config: Config, asked: Asked) -> Offer:
    try:
        build(session, surface, config)
    except Unsupported as error:
        return Offer(surface, option, _refusal(error, asked), str(error))
    except Exception as error:  # told as it is: this looks at the backend, and judges nothing
        return Offer(surface, option, "failed", f"{type(error).__name__}: {error}")
    return Offer(surface, option, "offered")


def _refusal(error: Unsupported, asked: Asked) -> How:
    return "refused" if refused_by(error, load(asked.backend)) == "library" else "not adapted"
