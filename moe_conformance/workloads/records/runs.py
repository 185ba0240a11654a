"""What a workload runs: a few types, each of which names its scenario; what varies within a type is a field.

A check asks for one of these values and reads the workloads whose `run` is equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Scenario = Literal["training step", "proxy model", "overlapped steps", "script"]
Tokens = Literal["distinct", "not finite", "duplicated"]
Option = Literal["", "capacity padding", "packing", "receive budget", "equal splits", "round robin", "chunks", "any"]


@dataclass(frozen=True)
class ExchangeStep:
    """Training steps of the backend's exchange, with experts of the suite.

    The experts are the probe, or return the very tensor that they receive ("identity"); with "identity of parts" the
    parts of experts that are cut are all or nothing. All ranks of a tp group hold the same tokens where these are
    "duplicated". With `unasked` x or the weights ask for no gradient, as the workload's twist names them. An `option`
    of the config is on trial, so that only the checks of that option read the run. Where the ids are `routed`, they are
    those of the backend's router, and forced routing is asked of it, of the exchange, or of both.
    """

    scenario: ClassVar[Scenario] = "training step"
    answered: Literal["probe", "identity", "identity of parts"] = "probe"
    tokens: Tokens = "distinct"
    unasked: bool = False
    option: Option = ""
    routed: Literal["", "both forced", "router forced", "exchange forced"] = ""

    def __str__(self) -> str:
        """For example `exchange with the probe, tokens not finite`."""
        words = [f"exchange with the {self.answered}"]
        words += [f"tokens {self.tokens}"] if self.tokens != "distinct" else []
        words += ["gradients unasked"] if self.unasked else []
        words += [f"option: {self.option}"] if self.option else []
        words += [f"routed: {self.routed}"] if self.routed else []
        return ", ".join(words)


@dataclass(frozen=True)
class ExpertsStep:
    """Training steps of the backend's exchange, with the backend's own experts.

    An `option` of the config is on trial, or gradients are `unasked`, as in `ExchangeStep`.
    """

    scenario: ClassVar[Scenario] = "training step"
    tokens: Tokens = "distinct"
    option: Literal["", "biases", "activation", "sharding", "optional"] = ""
    unasked: bool = False

    def __str__(self) -> str:
        """For example `experts, tokens duplicated`."""
        words = ["experts"]
        words += [f"tokens {self.tokens}"] if self.tokens != "distinct" else []
        words += ["gradients unasked"] if self.unasked else []
        words += [f"option: {self.option}"] if self.option else []
        return ", ".join(words)


@dataclass(frozen=True)
class RouterStep:
    """Training steps of the backend's router alone.

    One with a `capacity` is asked without it as well. Forced routing has chosen experts ("routes"), has them drawn or
    dealt, without gradients ("draws"), has logits of -inf ("masked"), makes some ranks or experts hot ("hot"), or is
    held against runs with larger biases ("spread"). With `noise` its routes are random, by jitter or by forcing.
    """

    scenario: ClassVar[Scenario] = "training step"
    capacity: bool = False
    logits: Literal["usual", "extreme"] = "usual"
    forced: Literal["", "routes", "draws", "masked", "hot", "spread"] = ""
    noise: bool = False

    def __str__(self) -> str:
        """For example `router, capacity`."""
        words = ["router"]
        words += ["capacity"] if self.capacity else []
        words += [f"{self.logits} logits"] if self.logits != "usual" else []
        words += [f"forced {self.forced}"] if self.forced else []
        words += ["noise"] if self.noise else []
        return ", ".join(words)


@dataclass(frozen=True)
class LayerStep:
    """Training steps of a whole layer, which `drops` tokens or not, and with `noise` has a router with jitter."""

    scenario: ClassVar[Scenario] = "training step"
    drops: bool = False
    noise: bool = False

    def __str__(self) -> str:
        """Say `layer`, and whether it drops or has noise."""
        return "layer" + (", dropping" if self.drops else "") + (", with noise" if self.noise else "")


@dataclass(frozen=True)
class ProxyModelStep:
    """A training step of a small model around a layer."""

    scenario: ClassVar[Scenario] = "proxy model"

    def __str__(self) -> str:
        """Say what it is."""
        return "proxy model"


@dataclass(frozen=True)
class OverlapStep:
    """Steps of several layers: one microbatch after the other, and as the backend overlaps them."""

    scenario: ClassVar[Scenario] = "overlapped steps"

    def __str__(self) -> str:
        """Say what it is."""
        return "overlapped steps"


@dataclass(frozen=True)
class Script:
    """Calls on one surface, which the method of Session that `surface` names builds.

    On the surface "exchange" calls are steps, or their halves, with the suite's experts between them; on "session" they
    are those of the session itself, and build surfaces; on "training_routers" each is a step of a trainer,
    as most are on "balancing_routers"; on "changing_experts" they change parameters of the experts, and call them;
    on "counted_experts" they read counters of shortcuts as well.
    """

    scenario: ClassVar[Scenario] = "script"
    surface: str

    def __str__(self) -> str:
        """Name the surface."""
        return self.surface


Run = ExchangeStep | ExpertsStep | RouterStep | LayerStep | ProxyModelStep | OverlapStep | Script
DrawnStep = ExchangeStep | RouterStep

ON_EXCHANGE, ON_SESSION = Script("exchange"), Script("session")
ON_TRAINING_ROUTERS, ON_CHANGING_EXPERTS = Script("training_routers"), Script("changing_experts")
ON_REPLAY_ROUTERS, ON_COUNTED_EXPERTS = Script("replay_routers"), Script("counted_experts")
ON_BALANCING_ROUTERS, ON_INITIAL_ROUTER = Script("balancing_routers"), Script("initial_router")
ON_CONFIG_RULES = Script("config_rules")


@dataclass(frozen=True)
class DrawnRuns:
    """What a check asks for that has Hypothesis draw its workloads."""

    of: DrawnStep

    def __str__(self) -> str:
        """For example `drawn: router`."""
        return f"drawn: {self.of}"


@dataclass(frozen=True)
class GroupAnswers:
    """What a check asks for that reads no run, but what the backend answers about its process groups."""

    def __str__(self) -> str:
        """Say what it is."""
        return "groups"


Asked = Run | DrawnRuns | GroupAnswers
