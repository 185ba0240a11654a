"""Configuration rules: which configurations must not be built as if nothing were wrong.

The table is data: of every rule its id, the options that are at fault, what breaks it, and what besides a
refusal is allowed. What follows from it is in `config_outcomes.py`, examples in `config_cases.py`.

Sources: behaviour of Megatron-Core and Megatron-Bridge (preconditions of overlap, of deferred weight gradients
and of exchange kernels); Shazeer et al. 2017, section 2.1 (K of E); DeepSeek-V2, section 2.2.2 (groups).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from moe_conformance.reference.config_rules.shown import older


@dataclass(frozen=True)
class Settings:
    """A configuration in neutral words. The defaults break no rule.

    `experts` None is a dense model; `groups` and `groups_chosen` are G and g; `virtual_stages` are per rank;
    `kernel` None is the documented default; `recompute_modules` calls the MoE layer "moe"; `capture` None is
    no graph, an empty set one of everything, else names such as "attention", "router", "moe", "mlp".
    `kernel_frees_input` (under overlap, the input of the experts' first product), `kernel_present` (of every rank,
    () is everywhere) and `versions` (of every active feature with a limit: library, needed, found) are facts, not
    options.
    """

    experts: int | None = 8
    top_k: int = 2
    groups: int | None = None
    groups_chosen: int | None = None
    ep: int = 2
    pp: int = 1
    virtual_stages: int | None = None
    dispatcher: Literal["alltoall", "allgather", "fused"] = "alltoall"
    kernel: str | None = None
    kernel_frees_input: bool = False
    kernel_present: tuple[bool, ...] = ()
    dtype: str = "bfloat16"
    overlap: bool = False
    overlap_shared: bool = False
    shared_experts: int = 0
    recompute: Literal["none", "full", "selective"] = "none"
    recompute_method: str | None = None
    recompute_layers: int | None = None
    recompute_modules: frozenset[str] = frozenset()
    prediction_layers: int | None = None
    capture: frozenset[str] | None = None
    offload_first_product: bool = False
    defer_weight_gradients: bool = False
    accumulate_in_product: bool = True
    attention_bias: bool = False
    packed: bool = False
    versions: tuple[tuple[str, str, str | None], ...] = ()


Change = Mapping[str, Any]  # option -> the value that a backend may openly put in its place


class Rule(NamedTuple):
    """A row of the table. A refusal is allowed for every rule; `changes` are alternatives, each as a whole."""

    id: str
    options: tuple[str, ...]
    breaks: Callable[[Settings], bool]
    honoured: bool = False
    changes: tuple[Change, ...] = ()


def broken(settings: Settings) -> tuple[str, ...]:
    """Name the rules that a configuration breaks, RULE-06 to RULE-27, ascending.

    Degenerate: E = 1 leaves ep = 1 only, which breaks RULE-06 besides RULE-07.

    >>> broken(Settings(overlap=True, ep=1, dtype="float32")), broken(Settings())
    (('RULE-06', 'RULE-09'), ())
    """
    return tuple(dict.fromkeys(rule.id for rule in RULES if rule.breaks(settings)))


def _captures(s: Settings, *scopes: str) -> bool:
    """Whether a captured graph takes in one of the scopes; an empty set takes in everything."""
    return s.capture is not None and (not s.capture or not s.capture.isdisjoint(scopes))


def _captures_weights(s: Settings) -> bool:
    """Whether a graph holds deferred weights (RULE-21): attention's, or shared experts' that run with the router."""
    beside_router = s.shared_experts > 0 and not s.overlap_shared
    return _captures(s, "attention") or (beside_router and _captures(s, "router"))


def _misfits_groups(s: Settings) -> bool:
    """Whether K of E experts cannot lie in g of G groups (RULE-27)."""
    if s.experts is None or (s.groups is None and s.groups_chosen is None):
        return False
    if s.groups is None or s.groups_chosen is None:
        return True
    G, g = s.groups, s.groups_chosen
    return g < 1 or g > G or s.experts % G != 0 or s.top_k * G > g * s.experts


def _overlap(
    id: str,
    option: str,
    breaks: Callable[[Settings], bool],
    *more: str,
    honoured: bool = True,
    changes: tuple[Change, ...] = (),
) -> Rule:
    """Make a rule that binds with overlap of exchange and computation alone."""
    return Rule(id, ("overlap", option, *more), lambda s: s.overlap and breaks(s), honoured, changes)


_OFF = ({"overlap": False},)
_SHARED_OFF = ({"overlap_shared": False},)
_REPLACED = ({"kernel": None, "dispatcher": "alltoall"}, {"kernel": None, "dispatcher": "allgather"})
_DEFERRED = "defer_weight_gradients"

# fmt: off
RULES = (
    _overlap("RULE-06", "ep", lambda s: s.ep == 1, honoured=False, changes=_OFF),
    _overlap("RULE-07", "experts", lambda s: s.experts is None or s.experts <= 1, honoured=False, changes=_OFF),
    _overlap("RULE-08", "dispatcher", lambda s: s.dispatcher == "allgather"),
    _overlap("RULE-09", "dtype", lambda s: s.dtype not in ("bfloat16", "float16")),
    _overlap("RULE-10", "pp", lambda s: s.pp > 1 and (s.virtual_stages or 1) < 2, "virtual_stages"),
    _overlap("RULE-11", "recompute", lambda s: s.recompute == "full"),
    _overlap("RULE-12", "recompute_method", lambda s: s.recompute_method is not None),
    _overlap("RULE-13", "recompute_layers", lambda s: s.recompute_layers is not None),
    _overlap("RULE-14", "recompute_modules", lambda s: "moe" in s.recompute_modules),
    _overlap("RULE-15", "overlap_shared", lambda s: s.overlap_shared and s.shared_experts > 0, "shared_experts",
             changes=_SHARED_OFF + _OFF),
    Rule("RULE-15", ("overlap_shared", "shared_experts"), lambda s: s.overlap_shared and s.shared_experts == 0,
         changes=_SHARED_OFF),
    _overlap("RULE-16", "prediction_layers", lambda s: (s.prediction_layers or 0) > 1),
    _overlap("RULE-17", "capture", lambda s: _captures(s, "moe", "mlp")),
    _overlap("RULE-18", "offload_first_product",
             lambda s: s.dispatcher == "fused" and s.kernel_frees_input and s.offload_first_product,
             "dispatcher", "kernel"),
    Rule("RULE-19", (), lambda s: any(older(found, needed) for _, needed, found in s.versions)),
    Rule("RULE-20", (_DEFERRED, "overlap"), lambda s: s.defer_weight_gradients and not s.overlap, honoured=True),
    Rule("RULE-21", (_DEFERRED, "capture", "accumulate_in_product"), honoured=True, breaks=lambda s:
         s.defer_weight_gradients and _captures_weights(s) and not s.accumulate_in_product),
    Rule("RULE-22", (_DEFERRED, "capture", "attention_bias"), honoured=True, breaks=lambda s:
         s.defer_weight_gradients and _captures(s, "attention") and s.attention_bias),
    Rule("RULE-23", ("kernel", "dispatcher"), lambda s: s.kernel is not None and s.dispatcher != "fused",
         changes=({"kernel": None}, {"dispatcher": "fused"})),
    Rule("RULE-24", ("kernel", "dispatcher"), lambda s: s.kernel is not None and not all(s.kernel_present),
         changes=_REPLACED),
    Rule("RULE-25", ("packed", "dispatcher"), lambda s: s.packed and s.dispatcher == "allgather", honoured=True),
    Rule("RULE-26", ("experts", "top_k"), lambda s: s.experts is not None and not 1 <= s.top_k <= s.experts),
    Rule("RULE-27", ("experts", "top_k", "groups", "groups_chosen"), _misfits_groups),
)
# fmt: on
