"""What a backend says of itself where correct implementations differ. It imports torch and nothing of the suite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch


class Malformed(Exception):
    """What the backend reports is inconsistent, such as counts that exceed the number of rows: a failure."""


@dataclass(frozen=True)
class Claims:
    """How a built surface differs from the default, each field with the requirements that verify it.

    The checks follow it: rows are counted against the claimed `wire`, and so on. A built surface that differs from the
    default has a property `claims`; it is read from the built object after the run, and `weights_at` after each
    forward. All surfaces of a run have to agree, and all ranks. Integers are at least 1.

    Raises:
        Malformed: a value is none of those that the annotation of its field allows.
    """

    # What dispatch sends to other ranks (COST-03, COST-04). pairs: one row for each routed pair; tokens: one row for
    # each token and destination rank; all: every token to every rank; copies: the adapter first gathered the tokens
    # over tp, since the library expects the same tokens on all tp ranks, and that traffic is not counted; capacity: C
    # rows from every rank to every expert, filled or not, C being the largest capacity of any rank of the group, or the
    # largest load of an expert on any rank where no capacity is configured; capacity_all: the same C rows for every
    # expert, gathered on all ranks of the group.
    wire: Literal["pairs", "tokens", "all", "copies", "capacity", "capacity_all"] = "pairs"
    # With "all" (COST-06). slots: ids and weights (T, K) are sent; maps: a boolean map (T, E) and a map of weights
    # (T, E), at most float32.
    routing: Literal["slots", "maps"] = "slots"
    # How many rows the experts receive (COST-10). routed: those routed to them; tokens: every token of the exchange
    # group; static: a fixed number, equal on all ranks (PACK-13); batched: as many for each expert of this rank as for
    # the one of them with the largest load.
    handed: Literal["routed", "tokens", "static", "batched"] = "routed"
    # The rows of each expert are padded to a multiple of it; receive buffers include the padding (COST-10).
    multiple: int = 1
    # With `Config.token_copies` (EXCH-36). complete: dL/dx and dL/dw are complete on every tp rank; parts: their sum
    # over tp is.
    copies: Literal["complete", "parts"] = "complete"
    # What a value that is not finite reaches (EXCH-41, EXCH-42). own: its own token and experts; all: any token and
    # expert of the exchange group, as in a product with one-hot tensors, which multiplies it by 0. With "all" these two
    # are reported as not adapted where something else is not finite; what is finite is judged all the same.
    non_finite: Literal["own", "all"] = "own"
    # Where this exchange applies routing weights (EXCH-05). None: as `Session.weights_at` says.
    weights_at: Literal["input", "expert", "combine"] | None = None
    # With `routing.forced` "round_robin" (FAST-14), where the ids of a rank begin. any: at any expert; zero: at
    # expert 0, since the backend's own router begins there, and its exchange relies on it.
    round_robin: Literal["any", "zero"] = "any"
    # `drop_policy` "position" (DROP-06). tokens: slots are kept in the order of tokens; choices: the first choices of
    # all tokens before any second choice.
    drop_order: Literal["tokens", "choices"] = "tokens"
    # `drop_policy` "weights" (DROP-05): the slots that are kept are those of the highest routing weights; or scores: of
    # the highest scores of the router, without expert bias, normalisation and scale.
    drop_by: Literal["weights", "scores"] = "weights"
    # A capacity that is no whole number is rounded up, or down (DROP-01).
    capacity_rounding: Literal["up", "down"] = "up"
    # With a capacity and `routing.normalise` (DROP-09, DROP-11). selected: weights are divided by the sum over all
    # slots that a token selected; kept: by the sum over those of them that were kept.
    normalised_over: Literal["selected", "kept"] = "selected"
    # A router adds noise while it trains (ROUTE-01, ROUTE-02). training: the built surface has a method `train(mode)`,
    # as `nn.Module` has, and the suite calls `train(False)` before it runs anything: without noise all checks hold.
    noise: Literal["no", "training"] = "no"
    # A capacity that drops nothing is rounded up to a multiple of tp, whose ranks share the rows (DROP-08).
    capacity_over: Literal["tp"] | None = None
    # What finished gradients hold of the losses of M microbatches and dp groups (LOSS-06, LOSS-08, LOSS-11): the
    # mean, or the sum, as of the main loss of this backend.
    loss_gradients: Literal["mean", "sum"] = "mean"
    # f_e of an auxiliary loss (LOSS-01). slots: the share of the routed slots, all f_e add up to 1; tokens: slots per
    # token, all f_e add up to K, and the loss is K times as large.
    loss_fractions: Literal["slots", "tokens"] = "slots"
    # A reported loss is divided by its coefficient, or not (LOSS-19).
    reported_losses: Literal["divided", "with_coefficient"] = "divided"
    # A reported z-loss is the same on all ranks, or that of a rank's own tokens, of which the mean over ranks is it
    # (LOSS-19).
    reported_z: Literal["same", "own"] = "same"
    # A global loss counts slots of the microbatches of the step so far, or of the present one alone (LOSS-07).
    global_counts: Literal["step", "microbatch"] = "step"
    # With a capacity, the loads that move a balance bias (BIAS-05). selected: of all slots that a router selected;
    # kept: of those that were not dropped.
    balance_loads: Literal["selected", "kept"] = "selected"
    # Of which tokens quantile balancing takes quantiles (BIAS-12). step: of all of the step; parts: of each microbatch
    # and data parallel group, and their mean; estimated: by histogram, which is not judged.
    balance_quantiles: Literal["step", "parts", "estimated"] = "step"
    # What the counters of loads hold between updates (BIAS-04, BIAS-05, BIAS-06). of_rank: the loads of this rank,
    # which the update sums over ranks; of_all: those of all ranks, summed in each forward.
    balance_counters: Literal["of_rank", "of_all"] = "of_rank"
    # Loads of forced routing (BIAS-07). ignored: the balance bias does not change; counted: it is updated by them as
    # by others.
    forced_loads: Literal["ignored", "counted"] = "ignored"
    # Token counts are padded to a common number, as `Config.padding.tokens`; also where it is not configured, if the
    # exchange cannot work otherwise (PACK-02, PACK-13).
    padding: Literal["no", "group_max", "bound"] = "no"
    # The padded number of tokens is a multiple of it; needed with `padding` (PACK-02).
    alignment: int | None = None
    # A step that is built with overlap has exchanges in flight while it computes (OVLP-12); no: it has none.
    overlap: Literal["yes", "no"] = "yes"
    # The dtype in which a router computes, if that is not the dtype of its tokens. With float32 on tokens of float64
    # layers are held to float32 (SHARE-01, GRAD-18, GROUP-07), and GROUP-07 fails if they compute in float64; checks of
    # routers alone do not follow it.
    dtype: torch.dtype | None = None
    # Chunks of packed sequences over cp (PACK-15). mirrored: rank c holds chunks c and 2 cp - 1 - c; other: any order.
    context_order: Literal["mirrored", "other"] = "mirrored"
    # With `Config.wire` "float8" (EXCH-30): the format in which the backward of combine sends gradients. None: they are
    # not rounded.
    gradient_format: Literal["e4m3", "e5m2"] | None = None
    # With `Config.wire` "float8" (EXCH-30, COST-09): the format of the numbers, and how many columns share a scale.
    wire_format: Literal["e4m3", "e5m2"] = "e4m3"
    wire_block: int | None = None  # None: all columns

    def __post_init__(self) -> None:
        """Refuse values that the annotations do not allow."""
        for name, allowed in _allowed().items():
            value = getattr(self, name)
            if value is not getattr(Claims, name) and not any(_is(value, each) for each in allowed):
                raise Malformed(f"Claims.{name} is {value!r}; allowed: {', '.join(map(_words, allowed))}")

    @property
    def changed(self) -> Mapping[str, Any]:
        """The fields that differ from their default."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    def joined(self, other: Claims) -> Claims:
        """Return what two surfaces claim together.

        Raises:
            Malformed: they claim different values of one field, neither of which is the default.
        """
        mine, others = self.changed, other.changed
        for name in mine.keys() & others.keys():
            if mine[name] != others[name]:
                raise Malformed(f"two surfaces claim {name} = {mine[name]!r} and {others[name]!r}; expected one value")
        return Claims(**{**mine, **others})


@cache
def _allowed() -> Mapping[str, tuple[Any, ...]]:
    """Return what every field may be: values, and types of values."""
    return {name: tuple(_parts(hint)) for name, hint in get_type_hints(Claims).items()}


def _parts(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return [part for each in get_args(hint) for part in _parts(each)]
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
