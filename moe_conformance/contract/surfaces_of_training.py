"""Optional surfaces that take part in training steps; `surfaces` exports all of it.

The rules and the letters of `contract` hold. Models have several layers: a tuple has an entry for every layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from moe_conformance.contract.exchange import Parametrised, Placed, Resolved, Routed


@dataclass(frozen=True)
class MeteredPass:
    """One pass of a step: "alone" is a training forward without a gradient, "abandon" gives up what came before it.

    A backward is that of the forward of its layer and microbatch. Padding has empty slots, as a drop has.
    """

    kind: Literal["forward", "backward", "alone", "evaluation", "abandon"]
    layer: int | None = None  # global number, from 0
    microbatch: int = 0
    ids_TK: Tensor | None = None  # of a forward: what dispatch receives
    padding_T: Tensor | None = None  # of a forward: bool, True = padding
    x: Tensor | None = None  # of a forward: (*lead, D), prod(lead) == T
    weights_TK: Tensor | None = None  # of a forward; they and x ask for gradients where a backward follows
    upstream: Tensor | None = None  # of a forward that a backward follows: the gradient of y, in the shape of x
    recomputed: bool = False  # of a forward that a backward follows: activation recomputation repeats it before that


@dataclass(frozen=True)
class MeteredResults:
    """What passes returned, in their order."""

    outputs: tuple[Tensor, ...]  # y of every forward, of any kind
    gradients: tuple[Tensor, ...]  # dL/dx and dL/dweights of every backward


@dataclass(frozen=True)
class Metered:
    """What a rank reports: scalars by name, with a prefix that is the same for all, and what else it has."""

    values: Mapping[str, float]
    step: int
    counts_E: Tensor | None = None  # int64: routed pairs of each expert, of this rank's tokens; None: no counter
    trace: Mapping[tuple[int, int], Tensor] | None = None  # the ids by layer and microbatch; None: no router trace


class LoadMeter(Placed, Protocol):
    """The meter of overload factors, attached to the exchange of the config. It is on at first.

    All ranks make all calls; those of a stage without such layers pass nothing.
    """

    def run(self, passes: Sequence[MeteredPass]) -> MeteredResults:
        """Run passes in order through the exchange, with experts of the backend's choice."""

    def report(self, number: int) -> Metered:
        """Tell the meter that the step of this number has ended; collective, with no microbatch in flight."""

    def switch(self, on: bool) -> None:
        """Switch the meter on or off, right after a report."""


@dataclass(frozen=True)
class Trained:
    """What the routers of a model return for one microbatch, in the order of layers."""

    routed: tuple[Routed, ...]
    loss: Tensor | None = None  # (): the losses that are returned, for the caller to add; None: they are attached


class TrainingRouters(Parametrised, Resolved, Protocol):
    """The routers of a model with the losses that train them (`Config.losses`), one per MoE layer.

    A microbatch is what the tp x cp ranks process together: every rank has its own part of S positions of B sequences,
    S the same on all of these ranks. `named` yields "router" with the number of the layer, from 0, in place of an
    expert id, and so "balance_bias". It claims `loss_gradients`, `loss_fractions`, `reported_losses`, `reported_z` and
    `global_counts`.

    A loss is attached (the backward through the routing weights adds its gradient, whatever gradient they have) or
    returned. Both in training only, and only where gradients are recorded.
    """

    def train(self, mode: bool = True) -> object:
        """Switch between training and evaluation, as `nn.Module` does; what is built is in training."""

    def begin_step(self, microbatches: int, scale: float) -> None:
        """Begin a step of that many microbatches, whose main loss is multiplied by `scale`: attached losses are too."""

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> Trained:
        """Return the routing of x (S, B, D) of every layer; the mask, bool (S * B,), is True at padding."""

    def finish(self, tokens: int) -> None:
        """Do what the trainer does between the last backward and the optimizer step; collective.

        `tokens` is the number of valid tokens of this rank's tp group in all microbatches of the step, by which
        gradients are divided, summed over dp and cp, if `Config.losses.per_token`.
        """

    def report(self) -> Mapping[str, Tensor] | None:
        """Return the loss, (), of the microbatches since the last report, by option of `Config.losses`; collective.

        The mean over microbatches, data parallel groups and layers with a router, the same on all ranks. None where the
        backend returns its losses and reports none: then the returned ones are judged alone.
        """


class BalancingRouters(Parametrised, Resolved, Protocol):
    """The routers of a model whose balance bias is updated by the load (`Config.balance`), one per MoE layer.

    `named` yields "router" and "balance_bias" with the number of the layer, from 0, in place of an expert id; the
    windows stay valid. Microbatches are those of `TrainingRouters`, without losses, and one update ends a step of any
    number of them. It claims `balance_loads`, `balance_counters`, `balance_quantiles` and
    `forced_loads`.
    """

    takes_mask: bool  # else no token is padding

    def train(self, mode: bool = True) -> object:
        """Switch between training and evaluation, as `nn.Module` does; what is built is in training."""

    def __call__(self, x: tuple[Tensor, ...], padding_mask_T: Tensor | None) -> tuple[Routed, ...]:
        """Return the routing of x (S, B, D) of every layer; the mask, bool (S * B,), is True at padding."""

    def update(self) -> None:
        """Do what the trainer does after the last backward of a step, in which every bias is updated; collective."""

    def loads(self) -> Sequence[Tensor] | None:
        """Return the counters of every layer, (E,), as they are since the last update; None if they cannot be read."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a checkpoint saves, as `nn.Module` does."""

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Load what `state_dict` returned, as `nn.Module` does."""

    def parameters(self) -> Iterable[Tensor]:
        """Return what the trainer's optimizer steps over."""


class OverlappedLayer(Parametrised, Protocol):
    """A layer of a model: it is called by itself, as any layer, or runs in the schedule of its step.

    `named` yields what a `surfaces.Layer` does, and what further parameters the workload has for its layers.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return y in the shape of x; its backward leaves no weight gradient for later."""


class OverlappedStep(Resolved, Protocol):
    """A training step of several MoE layers that overlaps exchanges with computation (`Config.overlap`).

    The layers follow each other: y = f_L(... f_1(x)). While tokens of one microbatch are dispatched or combined,
    something else is computed that does not need them. It claims `overlap` if it only looks like that.
    """

    @property
    def layers(self) -> Sequence[OverlappedLayer]:
        """The layers, `Config.overlap.layers` of them, with the parameters that the step trains."""

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return y of every microbatch after all forwards and backwards; collective, with as many on all ranks.

        Each x is a leaf (T, D) that asks for a gradient; upstream is dL/dy. Gradients are added to what x and the
        parameters have, those of deferred weights too, and none is left for later. Reductions over replicas follow in
        `Session.finish_gradients` of the layers.
        """


class ReplayRouters(Parametrised, Resolved, Protocol):
    """The routers of a model with router replay (`Config.replay`), one per MoE layer.

    `named` yields "router" and so on with the number of the layer in the model in place of an expert id. A place is
    the number of a layer in the model and that of a microbatch; several microbatches may be in flight. x is (S, B, D).
    """

    def record(self, microbatch: int, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        """Return the routing of x of every layer as without replay, and record the experts that are selected."""

    def records(self) -> Mapping[tuple[int, int], Tensor]:
        """Return what was recorded, ids (T, K) by place."""

    def load(self, records: Mapping[tuple[int, int], Tensor]) -> None:
        """Take records to be replayed, in place of those that are there."""

    def replay(self, microbatch: int, x: tuple[Tensor, ...]) -> tuple[Routed, ...]:
        """Return the routing of x of every layer to the recorded experts, weighed by the present logits.

        Raise where there is no record of its place, or one of another T or K.
        """
