"""What one run is fed: plain records of CPU tensors, drawn on the driver, the same objects for ranks and judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, overload

from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.records.runs import Run
from moe_conformance.workloads.records.schedule import FORWARD_ALONE, Operation, executes, operations

Asynchrony = Literal["plain", "poisoned", "watched"]
Lead = Literal["flat", "two_dims", "three_columns"]
SIZES = ("world", "tp", "cp", "pp", "ep", "etp")  # that make a layout
ParameterKey = tuple[str, int | None]  # (canonical name, global expert id or None)

COLUMNS: Mapping[Lead, int] = {"flat": 1, "two_dims": 2, "three_columns": 3}  # B of x (S, B, D)


@dataclass(frozen=True)
class Batch:
    """The tokens of one rank in one microbatch, their routing and the upstream gradient."""

    x_TD: Tensor
    ids_TK: Tensor  # int64, -1 = empty slot; route: (T, 0), the router decides
    weights_TK: Tensor
    upstream: Tensor  # gradient of the loss with respect to y (T, D); route: to the dense weights (T, E)


class Drawn(Sequence[tuple[Batch, ...]]):
    """Batches by microbatch and rank that are drawn when they are first looked at, and pickled as a tuple.

    A plan holds thousands of workloads, of which a run may want three.
    """

    def __init__(self, tokens: tuple[tuple[int, ...], ...], draw: Callable[[int, int], Batch]) -> None:
        """Take every T, by microbatch and rank, and what draws the batch of a microbatch on a rank."""
        self.tokens = tokens
        self._draw = draw

    @cached_property
    def _batches(self) -> tuple[tuple[Batch, ...], ...]:
        return tuple(tuple(self._draw(m, rank) for rank in range(len(each))) for m, each in enumerate(self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> tuple[Batch, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Batch, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[Batch, ...] | tuple[tuple[Batch, ...], ...]:
        return self._batches[index]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return tuple, (self._batches,)


@dataclass(frozen=True)
class Ref:
    """What an earlier call of the same script returned on this rank. It stays there: a handle may be anything."""

    call: int
    field: str = ""  # of its answer, "delivery.rows_RD" for a field of a field; "" for all of it


@dataclass(frozen=True)
class Filled:
    """Rows by place, (N, C, D), with NaN, and NaN for a gradient, in every place past those that are filled."""

    rows_NCD: Ref
    counts_N: Ref


@dataclass(frozen=True)
class Padded:
    """Rows by expert in segments, with a large number, and as large a gradient, in every row that is no pair's.

    The pairs of an expert are the first rows of its segment. Where nothing counts the segments, rows are left alone.
    """

    rows_RD: Ref
    counts_E: Ref
    pairs_E: tuple[int, ...]  # of every expert


@dataclass(frozen=True)
class Answered:
    """Rows (R, D) as experts return them, summed over its slots: local expert n returns n + 1 times it, weighted."""

    rows_RD: Ref
    ids_RK: Ref
    weights_RK: Ref


@dataclass(frozen=True)
class Root:
    """The square roots of a tensor that asks for a gradient: an output that autograd saves for its own backward."""

    leaf: Tensor  # greater than 0


Mode = Literal["no_grad", "enable_grad", "inference_mode", "deterministic", "deterministic, warn only"]
Through = Literal["", "fake", "meta", "export", "compile"]


@dataclass(frozen=True)
class Call:
    """One call of a method of a surface, on every rank.

    `given[r]` holds rank r's arguments by name: data, records of data (`contract.Routing`), or a `Ref`. An argument, or
    a field of one ("routing.weights_TK"), that `differentiable` names asks for a gradient. `upstream[r]` has, by field
    of the answer, the gradient that goes backward right after the call; nothing does where it is empty. With
    `may_raise` an exception is an answer, and the script goes on. It is made inside `modes`, outermost first, and of
    what it leaves of them the answer tells. `through` says what becomes of the call: its tensors have no data, or the
    method is exported or compiled as one graph, and the program is run.
    """

    method: str  # "__call__" for the surface itself
    given: tuple[Mapping[str, Any], ...]
    differentiable: tuple[str, ...] = ()
    upstream: tuple[Mapping[str, Tensor], ...] = ()
    may_raise: bool = False
    late: bool = False  # its upstream goes backward after the last call
    modes: tuple[Mode, ...] = ()
    through: Through = ""


Stride = Literal["rows", "columns", "transposed", "packed", "expanded", "swapped"]


@dataclass(frozen=True)
class Twist:
    """What is done around a run and to its inputs that must change nothing of what it gives.

    `strides` says how x, ids, weights and upstream lie in memory: every second row, every second column, transposed,
    columns in the middle of a wider tensor, a row that is there once and stands for all (of upstream: a number), or the
    second dimension before the first;
    what lies between them is NaN, of ids 2^40. Under `autocast` forwards run in a region that casts to the tokens' own
    dtype; with `create_graph` every backward keeps a graph of itself, as a second derivative needs it.
    The probe answers for expert e as for `probe_as[e]`. Of what `unasked` names, no gradients are wanted. `late[r]` are
    the seconds that rank r waits before every item of the schedule. With
    `padding_gradients` a large number takes the place of every gradient at the expert output of a padding
    row, or leaves the experts for one. A `lifetime` begins before the backend is imported ("process"), or as its
    session is opened ("session"), and ends when that is closed.
    A `deterministic` run is asked for deterministic algorithms before its session is opened, and has no others. A
    `rehearsed` one has taken a step with other parameters, of which nothing but the parameters has changed since. In a
    `hooked` one every parameter has a hook, which keeps the gradients that autograd passes to it. What is `recomputed`
    runs again in every backward: the experts alone, or whole forwards. With `without_optional` surfaces are built while
    all is hidden that the backend can do without.
    """

    strides: Mapping[str, Stride] = field(default_factory=dict)
    probe_as: tuple[int, ...] = ()  # empty: as for itself
    # Built too; each takes its own steps before every forward of this one, or its call before that of a script.
    beside: tuple[Workload, ...] = ()
    interleaved: bool = False  # of what is `beside`, each item of its schedule comes right behind this one's own
    unasked: tuple[Literal["x", "weights", "parameters"], ...] = ()
    late: tuple[float, ...] = ()
    seed: int | None = None  # of all random generators before the schedule, another on every rank
    autocast: bool = False
    create_graph: bool = False
    drawn: bool = False  # numbers are drawn from all of them before the schedule
    padding_gradients: bool = False
    lifetime: Literal["", "process", "session"] = ""
    deterministic: bool = False
    rehearsed: bool = False
    hooked: bool = False
    recomputed: Literal["", "experts", "all"] = ""
    without_optional: bool = False


@dataclass(frozen=True, repr=False)
class Workload:
    """One run: what is built, where, and what it is fed.

    `batches[m][r]` belongs to microbatch m on rank r. `parameters` are full tensors in canonical orientation, keyed by
    (name, global expert id). `lead` says in which shape x is passed, see `lead_of`.
    `asynchrony` says what asynchronous collectives deliver before they are waited for: whatever they have, or poison;
    if they are watched, every touch of their data until then is written down. `memory` says what new tensors hold that
    nobody has written yet: whatever was there, or NaN (the largest number, of integers).
    """

    name: str  # unique together with the variant and the layout
    run: Run
    config: Config
    layout: Layout
    batches: Sequence[tuple[Batch, ...]]
    # See `records.schedule`. The end of it ends a step too; of what is repeated nothing is kept but the memory in use.
    schedule: str = "F0 B0"
    parameters: Mapping[ParameterKey, Tensor] = field(default_factory=dict)
    lead: Lead = "flat"
    asynchrony: Asynchrony = "plain"
    memory: Literal["plain", "filled"] = "plain"
    calls: tuple[Call, ...] = ()  # a script, in place of batches and a schedule: calls on the one surface of `run`
    twist: Twist = field(default_factory=Twist)
    likened: Literal["", "quick", "full"] = ""  # the profile in which runs that must give the same are compared with it
    routers: int = 1  # that are built where a router runs alone: forward m goes through router m modulo their number
    golden: str = ""  # the chapter of the goldens whose values judge it; "" for the oracles of today
    # What it is drawn to show, where no other field says so: checks ask for these words, and never for its name.
    shows: frozenset[str] = frozenset()

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """T of every microbatch on every rank."""
        if isinstance(self.batches, Drawn):
            return self.batches.tokens
        return tuple(tuple(len(batch.x_TD) for batch in ranks) for ranks in self.batches)

    def lead_of(self, T: int) -> tuple[int, ...]:
        """Return the leading dims of T tokens: (T,), (T / 2, 2) or (T / 3, 3)."""
        columns = COLUMNS[self.lead]
        return (T,) if columns == 1 else (T // columns, columns)

    def goes_backward(self, microbatch: int) -> bool:
        """Whether the schedule asks for a microbatch's gradients."""
        return Operation("backward", microbatch) in operations(self.schedule)

    @property
    def finishes_without_grad(self) -> bool:
        """Whether gradients are finished under `torch.no_grad()`: where the schedule has forwards under it.

        A trainer may finish them in either mode.
        """
        return executes(self.schedule, "no_grad")

    def trains(self, microbatch: int) -> bool:
        """Whether a microbatch is run as in training, whether a backward follows or not."""
        return not any(
            each.name in FORWARD_ALONE for each in operations(self.schedule) if each.microbatch == microbatch
        )

    def through(self, variant: str) -> Workload:
        """Return the same run through another variant of the backend: of what is drawn, nothing depends on it."""
        if self.config.variant == variant:  # that it was drawn for
            return self

        def named(config: Any) -> Any:
            return replace(config, variant=variant) if isinstance(config, Config) else config

        calls = tuple(
            replace(call, given=tuple({name: named(value) for name, value in given.items()} for given in call.given))
            for call in self.calls
        )
        twist = replace(self.twist, beside=tuple(each.through(variant) for each in self.twist.beside))
        return replace(self, config=named(self.config), calls=calls, twist=twist)

    def __repr__(self) -> str:
        """Name it in a line: pytest shows arguments, and tensors would fill pages."""
        return f"<workload {self.config.variant}-{self.layout.name}-{self.name}>"


@dataclass(frozen=True)
class Wish:
    """Sizes to ask for, which may make no layout, and the order of axes; "" is the backend's usual one."""

    layout: Layout
    order: str = ""

    def __str__(self) -> str:
        """All sizes, and the order."""
        sizes = ", ".join(f"{name} = {getattr(self.layout, name)}" for name in SIZES)
        return f"{sizes} in the order {self.order}" if self.order else sizes
