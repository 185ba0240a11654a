"""The record of one run, `Workload`: config, layout and CPU tensors, drawn on the driver, for ranks and judges."""

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
SIZES = ("world", "tp", "cp", "pp", "ep", "etp")  # of a layout
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
    """Batches by microbatch and rank that are drawn at the first access, and pickled as a tuple.

    A plan has thousands of workloads, of which a run may use three.
    """

    def __init__(self, tokens: tuple[tuple[int, ...], ...], draw: Callable[[int, int], Batch]) -> None:
        """Keep T by microbatch and rank, and the function that draws the batch of a microbatch on a rank."""
        self.tokens = tokens
        self._draw = draw

    @cached_property
    def _batches(self) -> tuple[tuple[Batch, ...], ...]:
        return tuple(tuple(self._draw(m, rank) for rank in range(len(counts))) for m, counts in enumerate(self.tokens))

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
    """A reference to what an earlier call of the script returned on this rank, such as a handle."""

    call: int
    field: str = ""  # of its answer, "delivery.rows_RD" for a field of a field; "" for all of it


@dataclass(frozen=True)
class Filled:
    """Rows by place, (N, C, D), with NaN as value and as gradient in every unfilled place."""

    rows_NCD: Ref
    counts_N: Ref


@dataclass(frozen=True)
class Padded:
    """Rows by expert, with a large number as value and as gradient in every row of no routed pair.

    The pairs of an expert are the first rows of its segment. Without counts of the segments the rows are unchanged.
    """

    rows_RD: Ref
    counts_E: Ref
    pairs_E: tuple[int, ...]  # of every expert


@dataclass(frozen=True)
class Answered:
    """Expert outputs (R, D), summed over the slots of a row: local expert n returns n + 1 times the row, weighted."""

    rows_RD: Ref
    ids_RK: Ref
    weights_RK: Ref


@dataclass(frozen=True)
class Root:
    """The square root of a tensor that requires grad: an output that autograd saves for the backward of sqrt."""

    leaf: Tensor  # greater than 0


Mode = Literal["no_grad", "enable_grad", "inference_mode", "deterministic", "deterministic, warn only"]
Through = Literal["", "fake", "meta", "export", "compile"]


@dataclass(frozen=True)
class Call:
    """One call of a method of a surface, on every rank.

    `given[r]` holds rank r's arguments by name: data, records of data (`contract.Routing`), or a `Ref`. An argument, or
    a field of one ("routing.weights_TK"), that is in `differentiable` requires grad. `upstream[r]` has the upstream
    gradients, by field of the result, of a backward right after the call; there is none if it is empty. With
    `may_raise` an exception is recorded, and the script goes on. The call is made inside `modes`, outermost first; the
    answer records the deterministic setting after it. `through` says how the call is made: with tensors without data,
    or with the method exported or compiled as one graph.
    """

    method: str  # "__call__" for the surface itself
    given: tuple[Mapping[str, Any], ...]
    differentiable: tuple[str, ...] = ()
    upstream: tuple[Mapping[str, Tensor], ...] = ()
    may_raise: bool = False
    late: bool = False  # its backward runs after the last call
    modes: tuple[Mode, ...] = ()
    through: Through = ""


Stride = Literal["rows", "columns", "transposed", "packed", "expanded", "swapped"]


@dataclass(frozen=True)
class Twist:
    """Conditions of a run and of its inputs that must not change its results.

    `strides` says how x, ids, weights and upstream lie in memory: every second row, every second column, transposed,
    columns in the middle of a wider tensor, expanded from one row (upstream: from one number), or the second dimension
    before the first; the gaps hold NaN, or 2^40 for ids. With `autocast` forwards run under autocast to the dtype of
    the tokens; with `create_graph` every backward keeps its graph, as a second derivative needs it. The probe computes
    expert e as `probe_as[e]`. What is in `unasked` requires no gradient. Rank r waits `late[r]` seconds before every
    item of the schedule. With `padding_gradients` every gradient of a padding row, at the expert output and at the
    input, is replaced by a large number. A `lifetime` compares settings of the process from before the import of the
    backend ("process") or the opening of its session ("session") to the closing of the session. A `deterministic` run
    uses deterministic algorithms, from before its session is opened, and torch raises where it has none. A `rehearsed`
    run follows a step with other parameters; nothing but the parameters is reset. In a `hooked` run every parameter has
    a hook that records the gradients that autograd passes to it. With `recomputed` the experts, or whole forwards, run
    again in every backward. With `without_optional` surfaces are built while the optional parts of the backend are
    hidden.
    """

    strides: Mapping[str, Stride] = field(default_factory=dict)
    probe_as: tuple[int, ...] = ()  # empty: as for itself
    # Other workloads that are built too, and run before every forward of this one, or before every call of a script.
    beside: tuple[Workload, ...] = ()
    interleaved: bool = False  # operations of `beside` follow those of this one, one by one
    unasked: tuple[Literal["x", "weights", "parameters"], ...] = ()
    late: tuple[float, ...] = ()
    seed: int | None = None  # of all random generators before the schedule; plus the rank
    autocast: bool = False
    create_graph: bool = False
    drawn: bool = False  # numbers are drawn from all generators before the schedule
    padding_gradients: bool = False
    lifetime: Literal["", "process", "session"] = ""
    deterministic: bool = False
    rehearsed: bool = False
    hooked: bool = False
    recomputed: Literal["", "experts", "all"] = ""
    without_optional: bool = False


@dataclass(frozen=True, repr=False)
class Workload:
    """One run: its config, layout, inputs, parameters and schedule or script.

    `batches[m][r]` belongs to microbatch m on rank r. `parameters` are full tensors in canonical orientation, keyed by
    (name, global expert id). `lead` says in which shape x is passed, see `lead_of`.
    `asynchrony` says what the outputs of asynchronous collectives hold before `wait()`: what is there ("plain"), or NaN
    ("poisoned"); with "watched" every access to their data before that is recorded. `memory` says what uninitialised
    tensors hold: what is there ("plain"), or NaN and the largest integer ("filled").
    """

    name: str  # unique together with the variant and the layout
    run: Run
    config: Config
    layout: Layout
    batches: Sequence[tuple[Batch, ...]]
    # See `records.schedule`. Its end ends a step too; of repeated operations only the memory in use is recorded.
    schedule: str = "F0 B0"
    parameters: Mapping[ParameterKey, Tensor] = field(default_factory=dict)
    lead: Lead = "flat"
    asynchrony: Asynchrony = "plain"
    memory: Literal["plain", "filled"] = "plain"
    calls: tuple[Call, ...] = ()  # a script, in place of batches and a schedule: calls on the one surface of `run`
    twist: Twist = field(default_factory=Twist)
    likened: Literal["", "quick", "full"] = ""  # the profile in which twins are compared with it
    routers: int = 1  # number of routers of a `RouterStep`: forward m calls router m modulo this
    golden: str = ""  # the chapter of the golden that judges it; "": the oracles judge it
    # What it is drawn for, where no other field says so: checks select workloads by these words, never by name.
    shows: frozenset[str] = frozenset()
    rotates: bool = False  # runs in the rotation, and in the quick profile only where it is selected by its name

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
        """Return whether the schedule has a backward of a microbatch."""
        return Operation("backward", microbatch) in operations(self.schedule)

    @property
    def finishes_without_grad(self) -> bool:
        """Whether gradients are finished under `torch.no_grad()`: if the schedule has forwards under it.

        A trainer may finish them in either mode.
        """
        return executes(self.schedule, "no_grad")

    def trains(self, microbatch: int) -> bool:
        """Return whether a microbatch is run as in training, with or without a backward."""
        return not any(
            operation.name in FORWARD_ALONE
            for operation in operations(self.schedule)
            if operation.microbatch == microbatch
        )

    def through(self, variant: str) -> Workload:
        """Return the same run with another variant of the backend, on which no drawn tensor depends."""
        if self.config.variant == variant:  # already
            return self

        def through(given: Mapping[str, Any]) -> dict[str, Any]:
            configs = {name: value for name, value in given.items() if isinstance(value, Config)}
            return {**given, **{name: replace(config, variant=variant) for name, config in configs.items()}}

        calls = tuple(replace(call, given=tuple(map(through, call.given))) for call in self.calls)
        twist = replace(self.twist, beside=tuple(other.through(variant) for other in self.twist.beside))
        return replace(self, config=replace(self.config, variant=variant), calls=calls, twist=twist)

    def __repr__(self) -> str:
        """Return one line, since pytest prints arguments and tensors would fill pages."""
        return f"<workload {self.config.variant}-{self.layout.name}-{self.name}>"


@dataclass(frozen=True)
class Wish:
    """Sizes for which a backend's groups are requested, and the order of axes; "" is the backend's default order.

    The sizes may be impossible.
    """

    layout: Layout
    order: str = ""

    def __str__(self) -> str:
        """Return all sizes, and the order."""
        sizes = ", ".join(f"{name} = {getattr(self.layout, name)}" for name in SIZES)
        return f"{sizes} in the order {self.order}" if self.order else sizes
