"""Experts without gradients that use weights of before, other halves of them, or rows of other experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.backends.native.layer.batched_experts import Derived, DerivedWeights, batched
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.contract import Config, Delivery, Topology
from self_tests.planted_bugs.plant import SINGLE, Expectation, planted

_PR = "saforem2/torchtitan pull request 11, as its review suspected"


class _Keeps(DerivedWeights):
    """Keeps derived weights as long as a key of the weights is what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[object, Derived] = {}

    def key(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> object:
        raise NotImplementedError

    def of(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> Derived:
        key = self.key(gate_NFD, up_NFD, down_NDF)
        if key not in self.kept:
            self.kept.clear()
            self.kept[key] = self._derive(gate_NFD, up_NFD, down_NDF)
        return self.kept[key]

    def forget(self) -> None:
        self.kept.clear()


class _Keeping(Experts):
    """Experts with another way of keeping derived weights."""

    kind: type[DerivedWeights]

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        self.derived = self.kind()


class _ById(_Keeps):
    def key(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> object:
        return id(gate_NFD), id(up_NFD), id(down_NDF)


@planted(
    Expectation("FAST-06", "weights-recorded", "experts", "changed by copy_,", "gate, up, down are those of before"),
    Expectation(
        "FAST-06", "weights-loaded", "experts", "changed by load_state_dict,", "gate, up, down are those of before"
    ),
    real=_PR,
    layout=SINGLE,
)
class DerivedById(_Keeping):
    """Derived weights are kept by the identity of the parameters: a change in place leaves it as it is."""

    kind = _ById


class _OfGate(_Keeps):
    def key(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> object:
        return id(gate_NFD), gate_NFD._version


@planted(
    Expectation("FAST-06", "weights-one-alone", "experts", "the values of up are those of before the change"),
    layout=SINGLE,
)
class GateAloneIsWatched(_Keeping):
    """Of the three weights that two derived ones are made of, the version of the first alone is looked at."""

    kind = _OfGate


@planted(
    Expectation(
        "FAST-07", "weights-unrecorded", "experts", "changed by .data.copy_,", "gate, up, down are those of before"
    ),
    layout=SINGLE,
)
class AnnouncementIgnored(Experts):
    """A change without a trace is announced, and derived weights are kept all the same."""

    def weights_changed(self) -> None:
        """Do nothing."""


class _ByVersion(_Keeps):
    def key(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> object:
        return tuple((id(each), each._version) for each in (gate_NFD, up_NFD, down_NDF))


@planted(
    Expectation("FAST-07", "weights-of-inference-mode", "run", "Inference tensors do not track version counter"),
    layout=SINGLE,
)
class VersionOfAnInferenceTensor(_Keeping):
    """The version of every weight is read, and tensors that were made in inference mode have none."""

    kind = _ByVersion


class _ByVersionAlone(_Keeps):
    def key(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> object:
        return tuple(each._version for each in (gate_NFD, up_NFD, down_NDF))


@planted(
    Expectation(
        "FAST-08", "weights-replaced", "experts", "changed by a new Parameter,", "gate, up, down are those of before"
    ),
    layout=SINGLE,
)
class VersionWithoutItsTensor(_Keeping):
    """Derived weights are kept by the versions alone: another parameter may have been written as often."""

    kind = _ByVersionAlone


class _ByAddress(_Keeps):
    def key(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> object:
        return tuple((each.untyped_storage().data_ptr(), each.shape) for each in (gate_NFD, up_NFD, down_NDF))


@planted(
    Expectation("FAST-08", "weights-gathered-again", "experts", "changed by gathered again,", "are those of before"),
    layout=SINGLE,
)
class DerivedByAddress(_Keeping):
    """Derived weights are kept by the addresses of the weights, which a step on shards leaves as they are."""

    kind = _ByAddress


class _All(_Keeps):
    def key(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> object:
        return tuple((id(each), each._version) for each in (gate_NFD, up_NFD, down_NDF))

    def of(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> Derived:
        key = self.key(gate_NFD, up_NFD, down_NDF)
        return self.kept.setdefault(key, self._derive(gate_NFD, up_NFD, down_NDF))

    def forget(self) -> None:
        """Forget nothing."""


_EVERYWHERE = _All()


class _Shared(DerivedWeights):
    """One for all modules of the process."""

    def of(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> Derived:
        return _EVERYWHERE.of(gate_NFD, up_NFD, down_NDF)


@planted(
    Expectation(
        "FAST-09", "weights-memory", "experts", "hold values of the old weights after the weights were replaced"
    ),
    layout=SINGLE,
)
class DerivedOfEveryVersion(_Keeping):
    """Derived weights of every version are kept, in a table beside the modules that nothing is ever taken from."""

    kind = _Shared


@planted(
    Expectation("FAST-10", "experts-gradients", "gradient", "is None", "a forward without gradients derived and kept"),
    layout=SINGLE,
)
class DerivedInTraining(Experts):
    """Derived weights, made without gradients and kept, are used with gradients too where counts are equal."""

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        """Take the shortcut in every mode."""
        if len(set(counts_N)) != 1 or not self.derived._made:
            return super()._run(rows_PD, counts_N)
        return batched(rows_PD, self.derived.of(self.gate_NFD, self.up_NFD, self.down_NDF))


class _Swapped(DerivedWeights):
    def _derive(self, gate_NFD: Tensor, up_NFD: Tensor, down_NDF: Tensor) -> Derived:
        return super()._derive(up_NFD, gate_NFD, down_NDF)


@planted(
    Expectation("FAST-11", "experts-counts", "experts", "under no_grad on [3, 3, 3, 3]", "gate and up are swapped"),
    layout=SINGLE,
)
class HalvesSwapped(_Keeping):
    """The fused weights of the shortcut have up above gate, and its first half is taken for the gate's."""

    kind = _Swapped


@planted(
    Expectation("FAST-12", "experts-counts", "experts", "on [2, 4, 3, 3]", "every expert was given R / N = 3 rows"),
    Expectation("FAST-12", "experts-counts-unknown", "experts", "no counts", "every expert was given R / N = 3 rows"),
    layout=SINGLE,
)
class WheneverRowsDivide(Experts):
    """The shortcut for equal counts is taken where the number of rows divides by the number of experts."""

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        """Look at the sum of the counts alone."""
        if not torch.is_grad_enabled() and sum(counts_N) % len(counts_N) == 0:
            return batched(rows_PD, self.derived.of(self.gate_NFD, self.up_NFD, self.down_NDF))
        return super()._run(rows_PD, counts_N)


@planted(Expectation("FAST-13", "experts-strided", "experts", "rows as every second row of a tensor"), layout=SINGLE)
class RowsWithoutStrides(Experts):
    """Rows are read as if each lay right behind the one before, as a kernel does that is told an address alone."""

    def forward(self, delivery: Delivery) -> Tensor:
        """Read them so."""
        rows_RD = delivery.rows_RD
        dense_RD = rows_RD.as_strided(rows_RD.shape, (rows_RD.shape[1], 1))
        return super().forward(replace(delivery, rows_RD=dense_RD))


@planted(Expectation("FAST-13", "experts-strided", "gradient", "the gradient of"), layout=SINGLE)
class UpstreamWithoutStrides(Experts):
    """Upstream gradients are read as if each row lay right behind the one before."""

    def forward(self, delivery: Delivery) -> Tensor:
        """Read them so in the backward."""
        out_RD = super().forward(delivery)
        if out_RD.requires_grad:
            out_RD = _Dense.apply(out_RD)  # type: ignore[no-untyped-call]
        return out_RD


class _Dense(torch.autograd.Function):
    """The identity, with a gradient that is read without strides."""

    @staticmethod
    def forward(ctx: object, out_RD: Tensor) -> Tensor:
        return out_RD.view_as(out_RD)

    @staticmethod
    def backward(ctx: object, *upstream: Tensor) -> Tensor:
        return upstream[0].as_strided(upstream[0].shape, (upstream[0].shape[1], 1)).clone()
