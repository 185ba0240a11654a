"""The types of run of a workload. Every type names its scenario, and has fields for what varies within it.

A check names one of these values and reads the workloads whose `run` is equal to it. A chapter may define another type,
with a scenario of that name in the table `SCENARIOS` of its module `scenario`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

Tokens = Literal["distinct", "not finite", "duplicated"]
Option = Literal[
    "", "capacity padding", "packing", "receive budget", "equal splits", "round robin", "chunks", "rounding", "any"
]


class Run(Protocol):
    """A run of a workload: its scenario and options. Equal values are the same run."""

    scenario: ClassVar[str]  # the name of the class that ranks execute

    def __str__(self) -> str:
        """Return the name in reports, such as `exchange with the probe, tokens not finite`."""

    def __hash__(self) -> int:
        """Return a hash: runs are keys of dictionaries."""


@dataclass(frozen=True)
class ExchangeStep:
    """Training steps of the backend's exchange, with experts of the suite.

    The experts are the probe, or return the same tensor that they receive ("identity"); with "identity of parts" one
    etp shard of an expert returns all of it and the others zeros. With tokens "duplicated" all ranks of a tp group hold
    the same tokens. With `unasked` x or the weights require no gradient, as the workload's twist says. A run with an
    `option` is read by the checks of that option only. If ids are `routed`, they come from the backend's router, and
    the router, the exchange or both are configured with forced routing.
    """

    scenario: ClassVar[str] = "training step"
    answered: Literal["probe", "identity", "identity of parts"] = "probe"
    tokens: Tokens = "distinct"
    unasked: bool = False
    option: Option = ""
    routed: Literal["", "both forced", "router forced", "exchange forced"] = ""

    def __str__(self) -> str:
        """Return, for example, `exchange with the probe, tokens not finite`."""
        words = [f"exchange with the {self.answered}"]
        words += [f"tokens {self.tokens}"] if self.tokens != "distinct" else []
        words += ["gradients unasked"] if self.unasked else []
        words += [f"option: {self.option}"] if self.option else []
        words += [f"routed: {self.routed}"] if self.routed else []
        return ", ".join(words)


@dataclass(frozen=True)
class ExpertsStep:
    """Training steps of the backend's exchange, with the backend's experts.

    `option` and `unasked` are as in `ExchangeStep`.
    """

    scenario: ClassVar[str] = "training step"
    tokens: Tokens = "distinct"
    option: Literal["", "biases", "activation", "sharding", "optional"] = ""
    unasked: bool = False

    def __str__(self) -> str:
        """Return, for example, `experts, tokens duplicated`."""
        words = ["experts"]
        words += [f"tokens {self.tokens}"] if self.tokens != "distinct" else []
        words += ["gradients unasked"] if self.unasked else []
        words += [f"option: {self.option}"] if self.option else []
        return ", ".join(words)


@dataclass(frozen=True)
class RouterStep:
    """Training steps of the backend's router alone.

    A router with a `capacity` is also run without one. Forced routing gives known experts ("routes"), random or round
    robin ones without gradients ("draws"), logits of -inf ("masked"), hot ranks or experts ("hot"), or is compared with
    runs with larger biases ("spread"). With `noise` the routes are random, by jitter or by forcing.
    """

    scenario: ClassVar[str] = "training step"
    capacity: bool = False
    logits: Literal["usual", "extreme"] = "usual"
    forced: Literal["", "routes", "draws", "masked", "hot", "spread"] = ""
    noise: bool = False

    def __str__(self) -> str:
        """Return, for example, `router, capacity`."""
        words = ["router"]
        words += ["capacity"] if self.capacity else []
        words += [f"{self.logits} logits"] if self.logits != "usual" else []
        words += [f"forced {self.forced}"] if self.forced else []
        words += ["noise"] if self.noise else []
        return ", ".join(words)


@dataclass(frozen=True)
class LayerStep:
    """Training steps of a whole layer, with token drop (`drops`) or jitter in the router (`noise`)."""

    scenario: ClassVar[str] = "training step"
    drops: bool = False
    noise: bool = False

    def __str__(self) -> str:
        """Return, for example, `layer, dropping`."""
        return "layer" + (", dropping" if self.drops else "") + (", with noise" if self.noise else "")


@dataclass(frozen=True)
class Script:
    """Calls on one surface, which is built by the method of Session that `surface` names.

    On the surface "exchange" calls are steps, or dispatch and combine, with the probe expert; on "session" they are
    methods of the session, which build surfaces. A chapter may wrap a surface, to do more in a call or to call several
    surfaces: see the table `SCRIPT_SURFACES` of its module `scenario`.
    """

    scenario: ClassVar[str] = "script"
    surface: str

    def __str__(self) -> str:
        """Return the name of the surface."""
        return self.surface


@dataclass(frozen=True)
class AcceptedStep:
    """Steps of a layer with settings that the backend accepts, one after the other: two microbatches with each."""

    scenario: ClassVar[str] = "accepted settings"

    def __str__(self) -> str:
        """Return `accepted settings`."""
        return "accepted settings"


DrawnStep = ExchangeStep | RouterStep

ON_EXCHANGE, ON_SESSION = Script("exchange"), Script("session")
ON_TRAINING_ROUTERS, ON_CHANGING_EXPERTS = Script("training_routers"), Script("changing_experts")
ON_REPLAY_ROUTERS, ON_COUNTED_EXPERTS = Script("replay_routers"), Script("counted_experts")
ON_BALANCING_ROUTERS, ON_INITIAL_ROUTER = Script("balancing_routers"), Script("initial_router")
ON_CONFIG_RULES = Script("config_rules")


@dataclass(frozen=True)
class DrawnRuns:
    """The run of a check for which Hypothesis draws the workloads."""

    of: DrawnStep

    def __str__(self) -> str:
        """Return, for example, `drawn: router`."""
        return f"drawn: {self.of}"


@dataclass(frozen=True)
class GroupAnswers:
    """The run of a check that reads no run of a workload, but the backend's answers about its process groups."""

    def __str__(self) -> str:
        """Return `groups`."""
        return "groups"


RunSpec = Run | DrawnRuns | GroupAnswers
