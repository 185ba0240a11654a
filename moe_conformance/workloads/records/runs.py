"""What a workload runs: a few types, each of which names its scenario; what varies within a type is a field.

A check asks for one of these values and reads the workloads whose `run` is equal to it. A chapter may have another
type, with a scenario of that name in the table `SCENARIOS` of its module `scenario`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

Tokens = Literal["distinct", "not finite", "duplicated"]
Option = Literal["", "capacity padding", "packing", "receive budget", "equal splits", "round robin", "chunks", "any"]


class Run(Protocol):
    """What is run; values that are equal are the same run."""

    scenario: ClassVar[str]  # the name of what ranks execute

    def __str__(self) -> str:
        """Name it for people, as in `exchange with the probe, tokens not finite`."""

    def __hash__(self) -> int:
        """Runs are keys."""


@dataclass(frozen=True)
class ExchangeStep:
    """Training steps of the backend's exchange, with experts of the suite.

    The experts are the probe, or return the very tensor that they receive ("identity"); with "identity of parts" the
    parts of experts that are cut are all or nothing. All ranks of a tp group hold the same tokens where these are
    "duplicated". With `unasked` x or the weights ask for no gradient, as the workload's twist names them. An `option`
    of the config is on trial, so that only the checks of that option read the run. Where the ids are `routed`, they are
    those of the backend's router, and forced routing is asked of it, of the exchange, or of both.
    """

    scenario: ClassVar[str] = "training step"
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

    scenario: ClassVar[str] = "training step"
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

    scenario: ClassVar[str] = "training step"
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

    scenario: ClassVar[str] = "training step"
    drops: bool = False
    noise: bool = False

    def __str__(self) -> str:
        """Say `layer`, and whether it drops or has noise."""
        return "layer" + (", dropping" if self.drops else "") + (", with noise" if self.noise else "")


@dataclass(frozen=True)
class Script:
    """Calls on one surface, which the method of Session that `surface` names builds.

    On the surface "exchange" calls are steps, or their halves, with the suite's experts between them; on "session" they
    are those of the session itself, and build surfaces. A chapter may have ranks make more of a call, or call more
    than one surface: see the table `SCRIPT_SURFACES` of its module `scenario`.
    """

    scenario: ClassVar[str] = "script"
    surface: str

    def __str__(self) -> str:
        """Name the surface."""
        return self.surface


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
