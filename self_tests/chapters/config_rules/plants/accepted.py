"""RULE: settings that are accepted, and run otherwise than they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.backends.native.config_rules import ConfigRules
from moe_conformance.backends.native.layer.overlapped_step import OverlappedStep
from moe_conformance.contract import Claims, OverlappedLayer, Settings
from moe_conformance.contract import OverlappedStep as Step
from self_tests.planted_bugs.plant import EP2, Expectation, planted

_CASE = "accepted-settings"


class Dropping(ConfigRules):
    """Accepts options that native refuses, and runs the step without them."""

    without: ClassVar[Mapping[str, Any]]  # option: the value that runs

    def dropped(self, s: Settings) -> Settings:
        """Return what runs."""
        return replace(s, **self.without)

    def resolve(self, asked: Settings) -> Settings:
        """Resolve what runs, and return what was asked."""
        ran = super().resolve(self.dropped(asked))
        return replace(ran, **{name: getattr(asked, name) for name in self.without})

    def runs(self, s: Settings) -> None:
        """Run what runs."""
        super().runs(self.dropped(s))


class Altered:
    """A step that does something else beside what the step does that it wraps."""

    def __init__(self, step: Step) -> None:
        """Take the step."""
        self._step = step

    @property
    def layers(self) -> Sequence[OverlappedLayer]:
        """The layers."""
        return self._step.layers

    @property
    def resolved(self) -> Mapping[str, str]:
        """What the step reports."""
        return self._step.resolved

    @property
    def claims(self) -> Claims:
        """What the step claims."""
        claims: Claims = self._step.claims  # type: ignore[attr-defined]
        return claims

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the step."""
        return self._step.run(xs, upstreams)

    def parameters(self, *names: str) -> list[Tensor]:
        """Return the parameters that windows of those names show."""
        read: list[Tensor] = []

        def kept(parameter: Tensor) -> Tensor:
            read.append(parameter)
            return parameter.detach()

        windows = [window for layer in self.layers for window in layer.named(kept) if window.name in names]
        shown = {window.view.untyped_storage().data_ptr() for window in windows}
        return [parameter for parameter in read if parameter.untyped_storage().data_ptr() in shown]


# ---- options that are dropped ------------------------------------------------------------------------------------


@planted(
    Expectation(
        *("RULE-08", _CASE, "run", "Settings(ep=2, dispatcher='allgather', overlap=True) is accepted and"),
        "dispatcher = 'allgather' has no effect: it makes the products and collectives of",
    ),
    layout=EP2,
)
class AllGatherThatIsNone(Dropping):
    """The step that overlaps has an all-to-all, whichever dispatcher was accepted."""

    without: ClassVar = {"dispatcher": "alltoall"}


@planted(
    Expectation("RULE-11", _CASE, "run", "recompute='full'", "recompute = 'full' has no effect", "overlap=True)"),
    layout=EP2,
)
class FullRecomputationOfNothing(Dropping):
    """Recomputation of whole layers is accepted, and the schedule that overlaps never asks whether it is on."""

    without: ClassVar = {"recompute": "none", "recompute_method": None, "recompute_layers": None}


@planted(
    Expectation("RULE-14", _CASE, "run", "recompute_modules=('layernorm', 'moe')", "recompute = 'selective' has no"),
    real="Megatron-Core 0.16.1 takes recomputation of the MoE layer under overlap, and computes nothing again",
    layout=EP2,
)
class MoERecomputationOfNothing(Dropping):
    """Recomputation of the MoE layer is accepted, and its pieces keep what they computed."""

    without: ClassVar = {"recompute": "none", "recompute_modules": ()}


@planted(Expectation("RULE-15", _CASE, "run", "overlap_shared=True", "overlap_shared = True has no effect"), layout=EP2)
class BothOverlapsInName(Dropping):
    """Both overlaps are accepted without a word, and the schedule between microbatches is the only one that runs."""

    without: ClassVar = {"overlap_shared": False}


class _OneAfterTheOther(OverlappedStep):
    """Every backward follows its forward, and nothing is computed in between."""

    @classmethod
    def of(cls, step: Step) -> Step:
        """Return native's step with this schedule."""
        assert isinstance(step, OverlappedStep)
        return cls(step.config, step.layers, step._passes, type(step.queues[0]))

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        ys = []
        with self._putting_off():
            for x_TD, upstream_TD in zip(xs, upstreams, strict=True):
                passes = self._passes_of_all()
                ys.append(self._in_turn(self._forward(x_TD, passes)))
                self._in_turn(self._backward(x_TD, upstream_TD, passes))
        return ys


@planted(
    Expectation("RULE-10", _CASE, "run", "Settings(ep=2, overlap=True) is accepted, and", "0 collectives in flight"),
    layout=EP2,
)
class ScheduleOfOneStage(ConfigRules):
    """One stage gets the schedule without pipelining, which knows nothing of overlap."""

    def step(self, asked: Settings) -> Step:
        return _OneAfterTheOther.of(super().step(asked))


# ---- other values ------------------------------------------------------------------------------------------------


class _InBFloat16(Altered):
    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        rounded = [x.detach().bfloat16().to(x.dtype).requires_grad_() for x in xs]
        ys = self._step.run(rounded, upstreams)
        for x, other in zip(xs, rounded, strict=True):
            x.grad = other.grad
        return [y.bfloat16().to(y.dtype) for y in ys]


@planted(Expectation("RULE-09", _CASE, "combine", "dtype=torch.float32, overlap=True) is accepted, and y is"))
class CastBehindTheScenes(Dropping):
    """Any dtype is accepted, and the step rounds to bfloat16 what its kernels return."""

    without: ClassVar = {}

    def overlap_exchange(self, s: Settings) -> None:
        super().overlap_exchange(replace(s, dtype=torch.bfloat16))

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        return _InBFloat16(step) if asked.dtype in (torch.float32, torch.float64) else step


class _Forgetting(Altered):
    """Leaves out some gradients."""

    def __init__(self, step: Step, forget: Callable[[Altered], None]) -> None:
        super().__init__(step)
        self._forget = forget

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        ys = self._step.run(xs, upstreams)
        self._forget(self)
        return ys


def _zeroed(*names: str) -> Callable[[Altered], None]:
    def forget(step: Altered) -> None:
        for parameter in step.parameters(*names):
            assert parameter.grad is not None
            parameter.grad.zero_()

    return forget


@planted(
    Expectation("RULE-12", _CASE, "gradient", "recompute_method=", "is accepted, and", "it was never computed"),
    layout=EP2,
)
class MethodWithoutGradients(Dropping):
    """A method of recomputation has experts run without a graph in the forward, and nothing runs again."""

    without: ClassVar = {"recompute_method": None}

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        return step if asked.recompute_method is None else _Forgetting(step, _zeroed("gate", "up", "down"))


class _LastAlone(Altered):
    """Keeps the weight gradients of the last microbatch."""

    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        ys: list[Tensor] = []
        for x, upstream in zip(xs, upstreams, strict=True):
            for parameter in self.parameters("gate", "up", "down"):
                parameter.grad = None
            ys += self._step.run([x], [upstream])
        return ys


@planted(
    Expectation("RULE-13", _CASE, "gradient", "recompute_layers=1", "is that of microbatch 1 alone"),
    Expectation("RULE-13", _CASE, "gradient", "is accepted, and", "which replaced what was there"),
    layout=EP2,
)
class NumberOfLayersReplaces(Dropping):
    """With a number of recomputed layers the backward runs in a graph of its own, whose gradients replace others."""

    without: ClassVar = {"recompute_layers": None}

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        return step if asked.recompute_layers is None else _LastAlone(step)


class _Twice(Altered):
    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        self._step.run([x.detach().requires_grad_() for x in xs], upstreams)
        return self._step.run(xs, upstreams)


@planted(
    Expectation("RULE-16", _CASE, "gradient", "prediction_layers=2", "it is 2.000 x the expected value"),
    layout=EP2,
)
class PredictionLayersShareTheirWeights(Dropping):
    """A second prediction layer is accepted, and runs through the weights of the first, whose gradients count twice."""

    without: ClassVar = {"prediction_layers": None}

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        return _Twice(step) if (asked.prediction_layers or 0) > 1 else step


class _Captured(Altered):
    def run(self, xs: Sequence[Tensor], upstreams: Sequence[Tensor]) -> Sequence[Tensor]:
        if other := [x for x in xs if len(x) != len(xs[0])]:
            raise RuntimeError(f"the graph was captured with {len(xs[0])} tokens; given: {len(other[0])}")
        return self._step.run(xs, upstreams)


@planted(
    Expectation(
        *(
            "RULE-17",
            _CASE,
            "run",
            "capture=('attention', 'moe')) is accepted and cannot run: RuntimeError in the step",
        ),
        "overlapped: the graph was captured with 5 tokens",
    ),
    layout=EP2,
)
class GraphOfOneSize(Dropping):
    """A graph of the MoE layer is accepted, and has the sizes of the first microbatch."""

    without: ClassVar = {"capture": None}

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        return step if asked.capture is None else _Captured(step)


@planted(
    Expectation("RULE-18", _CASE, "gradient", "offload_first_product=True", "gradient of gate", "never computed"),
    layout=EP2,
)
class OffloadedAfterItWasFreed(Dropping):
    """The input of the first product is offloaded after the overlapped path has freed it, and comes back as zeros."""

    without: ClassVar = {"offload_first_product": False, "dispatcher": "alltoall", "kernel": None}

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        return _Forgetting(step, _zeroed("gate", "up")) if asked.offload_first_product else step


# ---- deferred weight gradients -----------------------------------------------------------------------------------


class _NeverFinished(_OneAfterTheOther):
    def _passes_of_all(self) -> list[Any]:
        passes = super()._passes_of_all()
        for each in passes:
            each.deferred = type(each.deferred)()  # of which nobody asks
        return passes


@planted(
    Expectation(
        *("RULE-20", _CASE, "gradient", "Settings(ep=2, defer_weight_gradients=True) is accepted, and"),
        *("gradient of", "is None; the sequential step has a gradient"),
    ),
    layout=EP2,
)
class DeferredWithoutAnEnd(ConfigRules):
    """Deferral is accepted without overlap, whose schedule is the only one that computes what was put off."""

    def deferral(self, s: Settings) -> None:
        super().deferral(replace(s, overlap=True))

    def runs(self, s: Settings) -> None:
        super().runs(replace(s, overlap=True))

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        return step if asked.overlap else _NeverFinished.of(step)


@planted(
    Expectation("RULE-20", _CASE, "run", "defer_weight_gradients = True has no effect: it makes the products and"),
    layout=EP2,
)
class DeferredInName(ConfigRules):
    """Deferral is accepted with overlap, and weight gradients are computed where autograd reaches them."""

    def step_config(self, s: Settings) -> Any:
        return super().step_config(replace(s, defer_weight_gradients=False))


@planted(
    Expectation(
        *("RULE-21", _CASE, "gradient", "accumulate_in_product=False) is accepted, and"),
        "is that of microbatch 1 alone, which replaced what was there",
    ),
    layout=EP2,
)
class GraphWritesGradients(Dropping):
    """A graph that was captured without gradients writes them where it would have to add."""

    without: ClassVar = {"capture": None, "accumulate_in_product": True}

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        return step if asked.accumulate_in_product else _LastAlone(step)


@planted(
    Expectation("RULE-22", _CASE, "gradient", "attention_bias=True) is accepted, and", "it was never computed"),
    layout=EP2,
)
class GraphWithABias(Dropping):
    """With a bias the captured backward of attention ends before what was put off is asked for."""

    without: ClassVar = {"capture": None, "attention_bias": False}

    def step(self, asked: Settings) -> Step:
        step = super().step(asked)
        return _Forgetting(step, _zeroed("gate", "up", "down")) if asked.attention_bias else step
