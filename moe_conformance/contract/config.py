"""What a backend is asked for: `Config` and its sections.

It imports torch only, and `contract` exports all of it. The option of Megatron-Core, torchtitan, transformers and
DeepSpeed for each field is in docs/glossary.md. Letters are those of contract.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch


class Unsupported(Exception):
    """This backend does not support what was asked for.

    `by="library"`: the code under test itself raised: a *proved* refusal. Its exception is `__cause__`, and was raised
    in the library's frames, not in the adapter's module (see `Backend.library_modules`); else it is the adapter's.
    `by="adapter"`: this adapter has no way to ask for it; reported as "not adapted", not as a property of the
    library. Raise it only while building: an exception from a running step is a failure.
    """

    def __init__(self, reason: str, by: Literal["library", "adapter"] = "adapter") -> None:
        super().__init__(reason)  # one sentence that names the value asked for
        self.by = by


# ---- valid values --------------------------------------------------------------------------------------------


@cache
def _fields(kind: type[Any]) -> list[tuple[str, Any, Callable[[object], bool]]]:
    """Return every option of a class with its annotation and what tells whether a value is of it."""
    return [(name, hint, _test_of(hint)) for name, hint in get_type_hints(kind).items()]


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of an annotation: a class, `Literal`, union or tuple of these. A float has to be finite."""
    return _test_of(hint)(value)


@cache
def _test_of(hint: Any) -> Callable[[object], bool]:
    """Return what tells whether a value is of an annotation, which is looked at once: thousands of values are."""
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        return lambda value: isinstance(value, str) and value in choices
    if get_origin(hint) is UnionType:
        tests = [_test_of(each) for each in choices]
        return lambda value: any(test(value) for test in tests)
    if get_origin(hint) is tuple:
        return partial(_fits_tuple, choices)
    if hint is int or hint is float:
        kinds = (int, float) if hint is float else int
        return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    return lambda value: hint is Any or isinstance(value, hint)


def _fits_tuple(choices: tuple[Any, ...], value: object) -> bool:
    if not isinstance(value, tuple):
        return False
    each_hint = choices[:1] * len(value) if choices[1:] == (...,) else choices
    return len(value) == len(each_hint) and all(map(_fits, value, each_hint))


def _allowed(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _check(options: Any, section: str = "", **least: int) -> None:
    """Raise ValueError for a value that its annotation does not allow, or for a number (of a tuple, any) below `least`.

    `section` begins the name of the option, as in "capacity.factor". What single values cannot show, such as more
    selected experts than there are, a backend refuses.
    """
    for name, hint, fits in _fields(type(options)):  # type: ignore[arg-type]  # it takes __hash__ of instances for it
        value = getattr(options, name)
        if not fits(value):
            raise ValueError(f"{section}{name} = {value!r}; allowed: {_allowed(hint)}")
    for name, allowed in least.items():
        value = getattr(options, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if any(number < allowed for number in numbers):
            raise ValueError(f"{section}{name} = {value!r}; allowed: {allowed} or more")


# ---- sections ------------------------------------------------------------------------------------------------


Strategy = Literal["random", "biased", "round_robin", "worst_rank", "one_expert", "one_node", "alternating", "ratio"]


@dataclass(frozen=True)
class RoutingOptions:
    """`Config.routing`: scores, selection and weights. Read by routers and layers."""

    score: Literal["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"] = "softmax"
    # softmax_topk: the K largest logits are selected, and the softmax is over them alone. A router that selects by the
    # softmax over all experts and normalises is "softmax" with `normalise`: it cannot tell apart what underflows there.
    normalise: bool = False  # the K weights of a token are divided by their sum
    scale: float = 1.0  # multiplies the weights, after normalisation
    groups: tuple[int, int] | None = None  # group-limited routing: (number of expert groups, groups selected)
    group_score: Literal["top2_sum", "topk_sum", "max"] = "top2_sum"  # topk_sum: of the best K / groups selected
    balance_bias: bool = False  # expert bias: added to the scores for the selection only, not for the weights
    # Forced routing: strategies in place of the router's scores, each with its parameter; two are refused. Random and
    # biased (parameter: standard deviation; negative: one bias is kept) replace the logits, all others the expert ids.
    # one_node has the number of expert parallel ranks of a node; ratio that of the hot rank's load over another's.
    forced: tuple[tuple[Strategy, float | None], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, "routing.")


@dataclass(frozen=True)
class Activation:
    """`Config.activation`: what an expert does between its projections; by default SwiGLU, silu(gate x) * up x."""

    # gelu: z Phi(z); gelu_tanh: its approximation by tanh; squared_relu: the square of relu
    function: Literal["silu", "gelu", "gelu_tanh", "relu", "squared_relu"] = "silu"
    gated: bool = True  # else function(up x), and there is no gate
    # What follows is of gated experts. gate x is cut to [-infinity, limit] and up x to [-limit, limit]; None: neither.
    limit: float | None = None
    slope: float = 1.0  # of silu: z sigmoid(slope z)
    offset: float = 0.0  # added to up x behind the cut

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, "activation.")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"activation.limit = {self.limit!r}; allowed: more than 0, or None")
        if not self.gated and (self.limit, self.slope, self.offset) != (None, 1.0, 0.0):
            raise ValueError("activation.limit, activation.slope and activation.offset are of gated experts")
        if self.function != "silu" and self.slope != 1.0:
            raise ValueError(f"activation.slope = {self.slope!r} is of silu, not of {self.function}")


@dataclass(frozen=True)
class SharedExperts:
    """`Config.shared`: the shared experts of a layer; none by default."""

    ffn: tuple[int, ...] = ()  # intermediate size of each shared expert; several may be fused into one
    gate: bool = False  # the output of the shared experts is multiplied by one sigmoid per token
    bias: bool = False  # every shared expert has an output bias, added before the gate
    overlap: bool = False  # shared experts run during the collectives of the exchange

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, "shared.", ffn=1)


@dataclass(frozen=True)
class Capacity:
    """`Config.capacity`: the token drop of a router, and the padding of an exchange to the capacity."""

    factor: float | None = None  # capacity C = ceil(factor K T / E) per expert and rank; None: no token drop
    minimum: int = 0  # lower bound of C
    drop_policy: Literal["weights", "position"] = "weights"  # kept: the slots of highest weight, or of the first tokens
    padded: bool = False  # each rank sends C rows to each expert; without a factor C is the group's top load

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, "capacity.", factor=0, minimum=0)


@dataclass(frozen=True)
class Padding:
    """`Config.padding`: token counts of the ranks of an exchange, and row counts of the experts."""

    # All ranks of the exchange group dispatch equally many tokens, padded by rows with empty slots: the largest T of
    # the group, or a fixed bound that no T may exceed; "no": only if the exchange itself cannot work otherwise.
    tokens: Literal["no", "group_max", "bound"] = "no"
    alignment: int = 1  # the padded number of tokens is a multiple of it
    bound: int | None = None
    packed: bool = False  # packed sequences (THD): T differs between ranks; an exchange that needs equal T refuses it
    row_multiple: int = 1  # the rows of each expert are padded to a multiple of it
    splits: Literal["own", "equal"] = "own"  # equal: every rank sends every other as many rows, padded with zeros

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, "padding.", alignment=1, bound=0, row_multiple=1)


@dataclass(frozen=True)
class ReceiveBuffer:
    """`Config.receive_buffer`: of fixed size, where the factor or the number of rows is given; not both."""

    factor: float | None = None  # a multiple of the balanced load of a rank
    rows: int | None = None  # the same as a number of rows
    overflow: Literal["refuse", "drop"] = "refuse"  # rows beyond the receive buffer: raise `Overflow`, or drop them

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, "receive_buffer.", rows=0)
        if self.factor is not None and self.factor <= 0:
            raise ValueError(f"receive_buffer.factor = {self.factor!r}; allowed: more than 0")


@dataclass(frozen=True)
class Losses:
    """`Config.losses`: coefficients of what trains a router beside the main loss, 0 for none. Read by routers."""

    auxiliary: float = 0.0  # E sum_e f_e P_e of a microbatch, f of its K choices per token, P of its scores
    sequence: float = 0.0  # the same of each sequence of a microbatch, averaged
    global_batch: float = 0.0  # f over all data parallel ranks and the microbatches of the step so far
    first_choice: float = 0.0  # as auxiliary, f of the first choice of each token (GShard)
    z: float = 0.0  # mean over tokens of the squared logarithm of the sum of exponentials of the logits
    per_token: bool = False  # finished gradients are divided by the number of valid tokens of the step
    recompute: bool = False  # activation recomputation of the router
    layers: int = 1  # routers of the model, one per MoE layer
    dense_layers: int = 0  # layers of the model without a router, before those with one

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        coefficients = ("auxiliary", "sequence", "global_batch", "first_choice", "z")
        _check(self, "losses.", **dict.fromkeys(coefficients, 0), layers=1, dense_layers=0)


@dataclass(frozen=True)
class Balance:
    """`Config.balance`: the training of the balance bias of routers (`Config.routing.balance_bias`)."""

    # sign: the rate is added to the bias of an expert below the mean load, and subtracted above it; quantile: the bias
    # becomes that by which every expert would have been selected by its share of the step's tokens
    rule: Literal["sign", "quantile"] = "sign"
    rate: float = 0.001  # of "sign"
    recompute: bool = False  # activation recomputation of the router
    layers: int = 1  # routers of the model, one per MoE layer
    dense_layers: int = 0  # layers of the model without a router, before those with one

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, "balance.", rate=0, layers=1, dense_layers=0)


@dataclass(frozen=True)
class Replay:
    """`Config.replay`: a model whose routers are given recorded experts (router replay)."""

    layers: tuple[int, ...] = (0,)  # numbers, ascending, of the layers of the model that have a router
    recompute: bool = False  # activation recomputation of the router

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, "replay.", layers=0)


@dataclass(frozen=True)
class Overlap:
    """`Config.overlap`: what is computed while tokens are exchanged. An exchange reads `chunks`, a step all others."""

    chunks: int = 1  # parts of the tokens, of which one is exchanged while experts run on another
    layers: int = 1  # MoE layers of the model that a step runs
    deferred_weights: bool = False  # delayed wgrad: weight gradients of experts follow the gradients of their inputs
    recompute_experts: bool = False  # activation recomputation of the routed experts, in the backward

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, "overlap.", chunks=1, layers=1)


@dataclass(frozen=True)
class Config:
    """One configuration, the same for every backend. A value that its annotation does not allow raises ValueError.

    Every builder of an adapter starts with `config.only(...)`, which refuses options that it does not map: with an
    ignored option the report would state something that was not tested. Options have names: "top_k", "capacity.factor"
    of a section, and "capacity" for all of it.
    """

    variant: str = "default"  # one of `Backend.variants`: "alltoall", "allgather", "local", ...
    experts: int = 8  # E; 0 is refused by the backend
    top_k: int = 2  # K
    hidden: int = 32  # D
    ffn: int = 16  # F
    dtype: torch.dtype = torch.float32
    weights_applied: Literal["native", "input", "output"] = "native"  # routing weights; native: as the backend does
    activation: Activation = Activation()  # of routed experts
    expert_biases: Literal["none", "output", "all"] = "none"  # of routed experts, behind down; all: gate and up as well
    # Of experts over their replicas (edp); own: as the backend has it. gradients: every replica keeps a part of each
    # finished gradient; parameters: it keeps a part of each parameter, and gathers all of it for a pass.
    sharding: Literal["own", "gradients", "parameters"] = "own"
    gate_bias: bool = False  # the logits of a router are x W^T + c, with c (E,) a parameter as W is
    router_dtype: torch.dtype | None = None  # in which a router computes logits, scores and weights; None: its choice
    jitter: float = 0.0  # in training the input of a router is multiplied by factors between 1 - jitter and 1 + jitter
    routing: RoutingOptions = RoutingOptions()
    shared: SharedExperts = SharedExperts()
    capacity: Capacity = Capacity()
    padding: Padding = Padding()
    receive_buffer: ReceiveBuffer = ReceiveBuffer()
    losses: Losses = Losses()
    balance: Balance = Balance()
    replay: Replay = Replay()
    overlap: Overlap = Overlap()
    token_copies: bool = False  # tp > 1 without sequence parallelism: the tp ranks hold the same tokens, counted once
    wire: Literal["plain", "float8"] = "plain"  # float8: fp8 dispatch, hidden states are sent in eight bits with scales
    extra: tuple[tuple[str, Any], ...] = ()  # options of one backend, under the library's own names

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not allowed."""
        _check(self, experts=0, top_k=1, hidden=1, ffn=1, jitter=0)

    def options(self) -> dict[str, Any]:
        """Return the value of every option by its name, in the order of the fields; sections are not among them."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if is_dataclass(value):
                found |= {f"{field.name}.{each.name}": getattr(value, each.name) for each in fields(value)}
            else:
                found[field.name] = value
        return found

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        known = {*_default_options(), *(field.name for field in fields(self))}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"Config has no option {', '.join(map(repr, unknown))}")

    def only(self, *mapped: str) -> Config:
        """Return the config itself, or raise `Unsupported` if an option outside `mapped` differs from its default.

        Raises:
            ValueError: a name in `mapped` is no option and no section.
        """
        self._refuse_unknown(mapped)
        default = _default_options()
        changed = {name: value for name, value in self.options().items() if value != default[name]}
        odd = [name for name in changed if not {name, name.partition(".")[0]} & {*mapped}]
        if odd:
            raise Unsupported(f"this adapter does not map {', '.join(f'{name}={changed[name]!r}' for name in odd)}")
        return self

    def changed(self, options: Mapping[str, Any]) -> Config:
        """Return the config with other values of some options or sections, by name.

        >>> Config().changed({"top_k": 1, "capacity.factor": 1.5}).capacity
        Capacity(factor=1.5, minimum=0, drop_policy='weights', padded=False)

        Raises:
            ValueError: a name is no option and no section, a section is given as well as an option of it, or a value is
                not allowed.
        """
        whole: dict[str, Any] = {}
        self._refuse_unknown(options)
        for name, value in options.items():
            section, _, option = name.partition(".")
            if option and section in options:
                raise ValueError(f"{section} and {name} are both given")
            before = whole.get(section, getattr(self, section))
            whole[section] = replace(before, **{option: value}) if option else value
        return replace(self, **whole)


@cache
def _default_options() -> dict[str, Any]:
    return Config().options()
