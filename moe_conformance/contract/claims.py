"""`Claims`: what a backend states about itself where correct implementations differ. Import it from `contract`.

Claims that concern one chapter of the spec are defined in the surface.py of that chapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from moe_conformance.contract.assembled import ClaimsPart
from moe_conformance.contract.errors import Malformed


@dataclass(frozen=True)
class Claims(ClaimsPart):
    """How a built surface differs from the default. Every field names the requirements that verify it.

    The checks follow the claims: rows are counted against the claimed `wire`, and so on. A built surface that differs
    from the default has a property `claims`; it is read from the built object after the run, and `weights_at` after
    each forward. All surfaces of a run have to agree, and all ranks. Integers are at least 1.

    Raises:
        Malformed: a value is not one of those that the annotation of its field allows.
    """

    # What dispatch sends to other ranks (COST-03, COST-04). pairs: one row for each routed pair; tokens: one row for
    # each token and destination rank; all: every token to every rank; copies: the adapter first gathered the tokens
    # over tp, since the library expects the same tokens on all tp ranks, and that traffic is not counted; capacity: C
    # rows from every rank to every expert, filled or not, C being the largest capacity of any rank of the group, or the
    # largest load of an expert on any rank where no capacity is configured; capacity_all: the same C rows for every
    # expert, gathered on all ranks of the group.
    wire: Literal["pairs", "tokens", "all", "copies", "capacity", "capacity_all"] = "pairs"
    # How routings are sent with `wire` "all" (COST-06). slots: as ids and weights (T, K); maps: as a boolean map (T, E)
    # and a map of weights (T, E), at most float32.
    routing: Literal["slots", "maps"] = "slots"
    # How many rows the experts receive (COST-10). routed: those routed to them; tokens: every token of the exchange
    # group; static: a fixed number, equal on all ranks (PACK-13); batched: as many for each expert of this rank as for
    # the one of them with the largest load.
    handed: Literal["routed", "tokens", "static", "batched"] = "routed"
    # The rows of each expert are padded to a multiple of this; receive buffers include the padding (COST-10).
    multiple: int = 1
    # Where this exchange applies routing weights (EXCH-05). None: as `Session.weights_at` says.
    weights_at: Literal["input", "expert", "combine"] | None = None
    # The dtype in which a router computes, if that is not the dtype of its tokens. With float32 on tokens of float64
    # layers are held to float32 (SHARE-01, GRAD-18, GROUP-07), and GROUP-07 fails if they compute in float64; checks of
    # routers alone do not follow it.
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Raise Malformed for a value that its annotation does not allow."""
        for name, allowed in _allowed().items():
            value = getattr(self, name)
            if value is not getattr(Claims, name) and not any(_is(value, choice) for choice in allowed):
                raise Malformed(f"Claims.{name} is {value!r}; allowed: {', '.join(map(_words, allowed))}")

    @property
    def changed(self) -> Mapping[str, Any]:
        """The fields that differ from their default."""
        return {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) != entry.default}

    def joined(self, other: Claims) -> Claims:
        """Return the claims of two surfaces as one.

        Raises:
            Malformed: the two claim different values of one field, neither of which is the default.
        """
        mine, others = self.changed, other.changed
        for name in mine.keys() & others.keys():
            if mine[name] != others[name]:
                raise Malformed(f"two surfaces claim {name} = {mine[name]!r} and {others[name]!r}; expected one value")
        return Claims(**{**mine, **others})


@cache
def _allowed() -> Mapping[str, tuple[Any, ...]]:
    """Return the allowed values, and types of values, of every field."""
    return {name: tuple(_parts(hint)) for name, hint in get_type_hints(Claims).items()}


def _parts(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return [part for choice in get_args(hint) for part in _parts(choice)]
    return [None if hint is type(None) else hint]


def _words(allowed: Any) -> str:
    if allowed is int:
        return "an integer of at least 1"
    return f"a {allowed.__module__}.{allowed.__qualname__}" if isinstance(allowed, type) else repr(allowed)


def _is(value: Any, allowed: Any) -> bool:
    if allowed is int:
        return type(value) is int and value >= 1
    if isinstance(allowed, type):
        return isinstance(value, allowed)
    return type(value) is type(allowed) and bool(value == allowed)
