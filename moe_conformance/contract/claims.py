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
    # How the outputs of experts come back with `wire` "all" (COST-03, COST-04). returned: to the rank of the token
    # alone, as by a reduce-scatter; all_reduced: the outputs of all tokens are summed on all ranks, of which each keeps
    # its own: twice the rows.
    combined: Literal["returned", "all_reduced"] = "returned"
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
    # What combine may round to the dtype of rows of bfloat16 or float16 (EXCH-05). combine_weights: rows: routing
    # weights, before they are multiplied; float32: no weight, also where the experts apply them. combine_sums: rows:
    # the sum, after each addition; float32: products, or what a rank has added up, and then the output, once each.
    combine_weights: Literal["rows", "float32"] = "rows"
    combine_sums: Literal["rows", "float32"] = "rows"
    # How often an expert lies in an ep group (EXPT-04). once: on one of its ranks; replicas: redundant experts, as load
    # balancing makes them (EPLB, EXCH-33): an expert may lie on several, once on each, and a routed pair reaches one of
    # these replicas, which the exchange chooses (EXCH-01). All replicas hold the same values and end with the same
    # gradient, that of the tokens of all of them (GRAD-05, GRAD-06), for which ep ranks may reduce gradients (COST-08).
    placement: Literal["once", "replicas"] = "once"
    # The scale of gradients between the two halves of an exchange (GRAD-01, GRAD-02). sum: backward passes them on as
    # they are; mean_over_ep: the backward of combine divides them by ep, and that of dispatch multiplies by it. So
    # experts have the mean over ep before their gradients are finished, and dL/dx is the same.
    expert_gradients: Literal["sum", "mean_over_ep"] = "sum"
    # The experts' own weights are not trained (GRAD-05, GRAD-06, GRAD-18, EXCH-41, EXCH-42): no, or experts: they have
    # no gradient, since what is trained is added to them (LoRA), is zero at first and has no name in `named`. Outputs
    # and the gradients of tokens, weights and router are judged; what is asked of these gradients is not adapted.
    frozen: Literal["no", "experts"] = "no"
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
