"""What one run on the ranks returns: CPU tensors, frozen, raw and not judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from moe_conformance.contract import Claims
from moe_conformance.contract.topology import RankLists
from moe_conformance.engine.ledger.disagreement import Disagreement
from moe_conformance.engine.ledger.entry import Entry, Hazard
from moe_conformance.workloads.records.workload import ParameterKey, Workload


@dataclass(frozen=True)
class Handed:
    """One call of the probe expert: what the backend delivered and which gradients passed it."""

    microbatch: int
    rows_RD: Tensor
    ids_RJ: Tensor  # int64 index into local_experts, -1 = nothing
    weights_RJ: Tensor | None
    counts_N: Tensor | None  # as reported
    shape: tuple[int, ...]  # as reported
    out_grad_RD: Tensor | None  # gradient that reached the experts' output (judges combine's backward)
    rows_grad_RD: Tensor | None  # gradient that left the experts' input (judges dispatch's backward)
    overflowed: bool | None = None  # as reported


@dataclass(frozen=True)
class Grad:
    """A gradient; absent (None) is not the same as zero, and both are kept."""

    value: Tensor | None
    shard: tuple[int, int, int] | None = None  # (dim, index, of) in canonical orientation


@dataclass(frozen=True)
class Finish:
    """The gradients of parameters at the end of one step."""

    local: Mapping[ParameterKey, Grad]  # after all backwards
    final: Mapping[ParameterKey, Grad] | None  # after finish_gradients; None where none is offered
    refusal: str | None  # why not


@dataclass(frozen=True)
class ExchangeSeen:
    """What one rank saw of its exchange in one microbatch; a run without an exchange has seen nothing."""

    handed: tuple[Handed, ...] = ()
    weights_at: str | None = None  # as the exchange told after this forward, where it does
    overflow: str | None = None  # what the dispatch said that refused; then there is nothing else
    handed_back: int = 0  # identity: rows that the experts answered with themselves, of all microbatches until then
    padding_gradients: int = 0  # padding rows at which the twist put a gradient of its own


@dataclass(frozen=True)
class RouterSeen:
    """What one rank's router returned for one microbatch; a run without a router has seen nothing."""

    ids_TK: Tensor | None = None
    weights_TK: Tensor | None = None
    logits_TE: Tensor | None = None
    counts_E: Tensor | None = None
    undropped_ids_TK: Tensor | None = None  # capacity: what the same router decides without one
    undropped_weights_TK: Tensor | None = None


@dataclass(frozen=True)
class Microbatch:
    """What one rank saw of one microbatch."""

    y: Tensor | None  # flattened to (T, D)
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype | None
    dx_TD: Grad  # as it was when the backward returned
    dweights_TK: Grad
    exchange: ExchangeSeen = field(default_factory=ExchangeSeen)
    router: RouterSeen = field(default_factory=RouterSeen)
    inputs_changed: tuple[str, ...] = ()  # of x, ids, weights, upstream: bytes that differ after the step
    outputs_changed: tuple[str, ...] = ()  # of y, rows: bytes that differ after its backward, or in the end
    gradients_changed: tuple[str, ...] = ()  # of x, weights: bytes that differ from when their backward returned


Memory = Literal["same tensor", "shared", "apart"]  # of two tensors: one object, one storage, or two


@dataclass(frozen=True)
class Answer:
    """What one call of a script brought about on one rank."""

    values: Mapping[str, Any] = field(default_factory=dict)  # what it returned, by field, "" if it has none; data only
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)  # of its arguments, when the script had ended
    claims: Claims = field(default_factory=Claims)  # of a surface that it built
    memory: Mapping[str, Memory] = field(default_factory=dict)  # of the tensor it returned, by tensor argument
    changed: tuple[str, ...] = ()  # arguments and upstream gradients whose bytes had changed when the script had ended
    differentiable: bool = False  # whether the tensor that it returned asks for a gradient
    deterministic: tuple[bool, bool] = (False, False)  # behind it: deterministic algorithms, and these only by warning
    error: str = ""  # the exception's message, where it raised
    error_type: str = ""  # and its type, with the module
    error_by: str = ""  # of `Unsupported`: "library" or "adapter"

    @property
    def raised(self) -> bool:
        """Whether the call ended in an exception."""
        return bool(self.error_type)


@dataclass(frozen=True, repr=False)
class RankOutcome:
    """What one rank returns; `reached` is the last phase that it entered (open, build, forward:0, finish, done)."""

    rank: int
    status: Literal["ok", "raised", "refused", "malformed", "hung", "died"]
    reached: str = ""
    error: str | None = None
    error_by: str | None = None  # refused: "library" or "adapter"
    traceback: str | None = None
    secondary: bool = False  # the consequence of another rank's fault
    microbatches: tuple[Microbatch, ...] = ()
    answers: tuple[Answer, ...] = ()  # of a script, by call
    local_experts: tuple[int, ...] = ()
    grads_local: Mapping[ParameterKey, Grad] = field(default_factory=dict)  # after all backwards
    grads_hooked: Mapping[ParameterKey, Grad] | None = None  # passed to hooks; None: nobody asked, or not in `grad`
    grads_final: Mapping[ParameterKey, Grad] | None = None  # after finish_gradients; None where none is offered
    earlier: tuple[Finish, ...] = ()  # of the steps before the last
    buffered: frozenset[ParameterKey] = frozenset()  # had room for their gradients before they were frozen
    finish_refusal: str | None = None
    state_changed: tuple[str, ...] = ()  # global state of the process that the schedule left otherwise than it was
    # A lifetime: settings of the process that differ, before the import and after closing; and how many there are.
    settings_changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    settings_seen: int = 0
    uncovered: tuple[str, ...] = ()  # parameters or elements that no window of named() covers, and copies
    resolved: Mapping[str, str] = field(default_factory=dict)  # for display; with what is claimed
    warned: tuple[str, ...] = ()  # what building routers warned of
    hidden: tuple[str, ...] = ()  # what the backend can do without, and was built without
    optional: tuple[str, ...] = ()  # of each surface that names it: what it uses of that, separated by commas
    claims: Claims = field(default_factory=Claims)  # of all surfaces
    weights_at: str = "combine"
    partial: bool = False  # Session.expert_output_is_partial
    loss_convention: str = "sum"
    output: str | None = None  # the end of what a rank printed that did not finish
    # Phases in order, each with how many collectives were called before it; "answered" begins as the experts are asked.
    phases: tuple[tuple[str, int], ...] = ()
    live_groups: tuple[int, ...] = ()  # process groups that there were after each backward
    seen: Any = None  # what the scenario of a chapter saw beside all this: a record of that chapter
    bytes_in_use: tuple[int | None, ...] = ()  # after each repetition; None where the process cannot tell
    ledger: tuple[Entry, ...] = ()  # its collectives; written by the engine, past the backend
    hazards: tuple[Hazard, ...] = ()  # what it did to the data of asynchronous ones before they had come

    def __repr__(self) -> str:
        """Name it in a line: pytest shows arguments, and tensors would fill pages."""
        return f"<rank {self.rank}: {self.status}>"


@dataclass(frozen=True, repr=False)
class Outcome:
    """One run, all ranks: what the judge reads."""

    backend: str
    workload: Workload
    ranks: tuple[RankOutcome, ...]
    seconds: float
    disagreements: tuple[Disagreement, ...] = ()  # of the ranks' ledgers, the earliest first

    def __repr__(self) -> str:
        """Name it in a line, with how the ranks ended."""
        return f"<outcome of {self.backend} on {self.workload!r}: {', '.join(rank.status for rank in self.ranks)}>"

    @property
    def refusal(self) -> RankOutcome | None:
        """The first rank that refused while building, if any did."""
        return next((rank for rank in self.ranks if rank.status == "refused"), None)

    @property
    def blamed(self) -> tuple[RankOutcome, ...]:
        """Ranks that did not finish by a fault of their own."""
        return tuple(r for r in self.ranks if r.status not in ("ok", "refused") and not r.secondary)


@dataclass(frozen=True)
class Told:
    """What the backend answered: rank lists by name, or why there are none."""

    lists: dict[str, RankLists] | None
    error: str = ""
    by: Literal["", "library", "adapter", "raised"] = ""  # who refused; raised: an exception that is no refusal
