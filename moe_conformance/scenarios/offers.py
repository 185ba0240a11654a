"""Find out what a backend offers, by building every surface with a small config and with every option changed."""

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

# The gate of a library may allow only one of these configs; a router or a layer is tried with all, plain first.
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

# A library may overlap models in half precision alone.
STEPS: Mapping[str, Mapping[str, Any]] = {"bfloat16": {"dtype": torch.bfloat16}}
OTHERWISE: Mapping[str, Mapping[str, Mapping[str, Any]]] = {"router": GATES, "layer": GATES, "overlapped_step": STEPS}

How = Literal["offered", "refused", "not adapted", "failed"]


@dataclass(frozen=True)
class OfferRequest:
    """The backend, variant and layout that a rank tries."""

    backend: str
    variant: str
    layout: Layout


@dataclass(frozen=True)
class Offer:
    """How the build of a surface ended on one rank; `option` is "" if no option was changed."""

    surface: str
    option: str
    how: How
    reason: str = ""
    gate: str = ""  # the entry of `OTHERWISE` with which it was built


def names() -> tuple[str, ...]:
    """Return the names of all surfaces: the methods of a session that take a config."""
    methods = inspect.getmembers(Session, inspect.isfunction)
    return tuple(name for name, method in methods if "config" in inspect.signature(method).parameters)


def run(context: RankContext, request: OfferRequest) -> tuple[Offer, ...]:
    """Build every surface, and those in `WITH_OPTIONS` with every option; one that is not offered is built once.

    If the session is refused when it is opened, that is reported as a surface named "session".
    """
    try:
        session = opened(context, request.backend, request.layout).session
    except Unsupported as error:
        return (Offer("session", "", _refusal(error, request), str(error)),)
    plain = Config(variant=request.variant)
    found = []
    for surface in names():
        offer, config = _first(session, surface, plain, request)
        found.append(offer)
        if offer.how == "offered" and surface in WITH_OPTIONS:
            tried = ((option, config.changed(values)) for option, values in OPTIONS.items())
            found += [_try(session, surface, option, changed, request) for option, changed in tried]
    return tuple(found)


def _first(session: Any, surface: str, plain: Config, request: OfferRequest) -> tuple[Offer, Config]:
    """Build a surface with the plain config, or with the first of `OTHERWISE` that it accepts, and return the config.

    If it accepts none, the offer of the plain config is returned.
    """
    first = _try(session, surface, "", plain, request)
    again = first.how == "not adapted" or (first.how == "refused" and surface == "overlapped_step")
    for gate, values in OTHERWISE.get(surface, {}).items() if again else ():
        offer = _try(session, surface, "", plain.changed(values), request)
        if offer.how == "offered":
            return replace(offer, gate=gate), plain.changed(values)
    return first, plain


def _try(session: Any, surface: str, option: str, config: Config, request: OfferRequest) -> Offer:
    try:
        build(session, surface, config)
    except Unsupported as error:
        return Offer(surface, option, _refusal(error, request), str(error))
    except Exception as error:  # reported as it is: nothing is judged here
        return Offer(surface, option, "failed", f"{type(error).__name__}: {error}")
    return Offer(surface, option, "offered")


def _refusal(error: Unsupported, request: OfferRequest) -> How:
    return "refused" if refused_by(error, load(request.backend)) == "library" else "not adapted"
