"""The records that ranks return from one run: frozen dataclasses of CPU tensors, not judged."""

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
    """One call of the probe expert: the delivery, and the gradients that passed through the expert."""

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
    """A gradient, or its absence: `value` is None if there is none, which is not the same as zeros."""

    value: Tensor | None
    shard: tuple[int, int, int] | None = None  # (dim, index, of) in canonical orientation


@dataclass(frozen=True)
class Finish:
    """The gradients of parameters at the end of one step."""

    local: Mapping[ParameterKey, Grad]  # after all backwards
    final: Mapping[ParameterKey, Grad] | None  # after finish_gradients; None if the backend does not offer it
    refusal: str | None  # why there are no final gradients


@dataclass(frozen=True)
class ExchangeSeen:
    """What one rank observed of its exchange in one microbatch; empty in a run without an exchange."""

    handed: tuple[Handed, ...] = ()
    weights_at: str | None = None  # as the exchange claimed after this forward, if it does
    overflow: str | None = None  # message of a dispatch that refused; then all else is empty
    handed_back: int = 0  # rows that identity experts returned in place, in all microbatches so far
    padding_gradients: int = 0  # padding rows whose gradient the twist replaced


@dataclass(frozen=True)
class RouterSeen:
    """What one rank's router returned for one microbatch; empty in a run without a router."""

    ids_TK: Tensor | None = None
    weights_TK: Tensor | None = None
    logits_TE: Tensor | None = None
    counts_E: Tensor | None = None
    undropped_ids_TK: Tensor | None = None  # with a capacity: what the same router selects without one
    undropped_weights_TK: Tensor | None = None


@dataclass(frozen=True)
class Microbatch:
    """What one rank observed of one microbatch."""

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
    """The result of one call of a script on one rank."""

    values: Mapping[str, Any] = field(default_factory=dict)  # what it returned, by field, "" if it has none; data only
    gradients: Mapping[str, Tensor | None] = field(default_factory=dict)  # of its arguments, at the end of the script
    claims: Claims = field(default_factory=Claims)  # of a surface that it built
    memory: Mapping[str, Memory] = field(default_factory=dict)  # of the returned tensor, by tensor argument
    changed: tuple[str, ...] = ()  # arguments and upstream gradients whose bytes had changed when the script had ended
    differentiable: bool = False  # whether the tensor that it returned asks for a gradient
    deterministic: tuple[bool, bool] = (False, False)  # after the call: whether enabled, whether warning only
    groups: int = 0  # process groups of the process after the call
    error: str = ""  # the exception's message, where it raised
    error_type: str = ""  # and its type, with the module
    error_by: str = ""  # of `Unsupported`: "library" or "adapter"

    @property
    def raised(self) -> bool:
        """Whether the call raised an exception."""
        return bool(self.error_type)


@dataclass(frozen=True, repr=False)
class RankOutcome:
    """The record of one rank; `reached` is the last phase that it entered (open, build, forward:0, finish, done)."""

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
    grads_hooked: Mapping[ParameterKey, Grad] | None = None  # passed to hooks; None: no hooks, or not in `grad`
    grads_final: Mapping[ParameterKey, Grad] | None = None  # after finish_gradients; None where none is offered
    earlier: tuple[Finish, ...] = ()  # of the steps before the last
    buffered: frozenset[ParameterKey] = frozenset()  # parameters that had a gradient before they were frozen
    finish_refusal: str | None = None
    state_changed: tuple[str, ...] = ()  # global state of the process that the schedule changed
    # A lifetime: settings of the process that differ, before the import and after closing; and how many there are.
    settings_changed: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    settings_seen: int = 0
    uncovered: tuple[str, ...] = ()  # what no view of named() covers, and views that are copies
    resolved: Mapping[str, str] = field(default_factory=dict)  # for display; with what is claimed
    warned: tuple[str, ...] = ()  # warnings while routers were built
    hidden: tuple[str, ...] = ()  # optional parts that the backend was built without
    optional: tuple[str, ...] = ()  # of every surface that names them: the optional parts it uses
    claims: Claims = field(default_factory=Claims)  # of all surfaces
    weights_at: str = "combine"
    partial: bool = False  # Session.expert_output_is_partial
    loss_convention: str = "sum"
    output: str | None = None  # the end of what a rank printed that did not finish
    # Phases in order, each with how many collectives were called before it; "answered" begins as the experts are asked.
    phases: tuple[tuple[str, int], ...] = ()
    live_groups: tuple[int, ...] = ()  # number of process groups after each backward
    seen: Any = None  # a further record, of the scenario of a chapter
    bytes_in_use: tuple[int | None, ...] = ()  # after each repetition; None where the process cannot tell
    ledger: tuple[Entry, ...] = ()  # its collectives, as recorded by the engine
    hazards: tuple[Hazard, ...] = ()  # accesses to data of asynchronous collectives before their wait

    def __repr__(self) -> str:
        """Return one line, since pytest prints arguments and tensors would fill pages."""
        return f"<rank {self.rank}: {self.status}>"


@dataclass(frozen=True, repr=False)
class Outcome:
    """The records of all ranks of one run, which the judge reads."""

    backend: str
    workload: Workload
    ranks: tuple[RankOutcome, ...]
    seconds: float
    disagreements: tuple[Disagreement, ...] = ()  # of the ranks' ledgers, the earliest first

    def __repr__(self) -> str:
        """Return one line with the status of every rank."""
        return f"<outcome of {self.backend} on {self.workload!r}: {', '.join(rank.status for rank in self.ranks)}>"

    @property
    def refusal(self) -> RankOutcome | None:
        """The first rank that refused while building, if any did."""
        return next((rank for rank in self.ranks if rank.status == "refused"), None)

    @property
    def blamed(self) -> tuple[RankOutcome, ...]:
        """The ranks that did not finish because of a fault on that rank itself."""
        return tuple(r for r in self.ranks if r.status not in ("ok", "refused") and not r.secondary)


@dataclass(frozen=True)
class GroupAnswer:
    """The backend's answer about process groups: rank lists by name, or why there are none."""

    lists: dict[str, RankLists] | None
    error: str = ""
    by: Literal["", "library", "adapter", "raised"] = ""  # who refused; raised: an exception that is no refusal
