"""EXPT: bugs in the biases and in the activation of the backend's own experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.layer.activated_experts import ActivatedExperts, ExpertBiases, activate
from moe_conformance.backends.native.row_ops.permutation import permute, sort_pairs, unpermute, weigh
from moe_conformance.contract import Delivery, Named, Read
from self_tests.planted_bugs.plant import EP2_EDP2, EP2_ETP2, Expectation, planted

# ---- biases ------------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXPT-06", "own-biased-ungated-gelu-even", "experts", "y of rank 0"),
    real="vllm-project/vllm PR #57092",
)
class FirstUpBiasWithoutGate(ActivatedExperts):
    """Experts without a gate take the biases of up with stride 0: those of the rank's first expert."""

    def answer(self, rows_RD: Tensor, n: int) -> Tensor:
        of = self.units
        if of.gate_NFD is not None or of.bias_up_NF is None:
            return super().answer(rows_RD, n)
        hidden_RF = self.hidden(None, F.linear(rows_RD, of.up_NFD[n], of.bias_up_NF[0]))
        return F.linear(hidden_RF, of.down_NDF[n], None if self.biases is None else self.biases.added(n))


@planted(
    Expectation("EXPT-06", "own-biased-even", "experts", "the output bias was added 2 times"),
    real="pytorch/torchtitan commit ec30db9d0 (#4245)",
    layout=EP2_ETP2,
)
class BiasOfEveryPart(ExpertBiases):
    """Every rank of etp adds the whole output bias to its part of the sum."""

    def added(self, n: int) -> Tensor | None:
        return self.bias_ND[n]


@planted(
    Expectation("EXPT-06", "own-biased-even", "experts", "the output bias was not multiplied by the routing weight")
)
class BiasBehindTheWeight(ActivatedExperts):
    """The output bias is added after the answers were multiplied by the routing weights."""

    def forward(self, delivery: Delivery) -> Tensor:
        pairs = sort_pairs(delivery.ids_RJ, self.placement.held)
        rows = permute(delivery.rows_RD, pairs).split(pairs.counts_E.tolist())
        biases, self.biases = self.biases, None
        out_PD = torch.cat([self.answer(each, n) for n, each in enumerate(rows)])
        self.biases = biases
        if delivery.weights_RJ is not None:
            out_PD = weigh(out_PD, delivery.weights_RJ[pairs.token_P, pairs.slot_P])
        if biases is not None:
            out_PD = out_PD + biases.bias_ND.repeat_interleave(pairs.counts_E, 0)
        return unpermute(out_PD, pairs).reshape(delivery.shape)


@planted(
    Expectation("EXPT-06", "own-biased-even", "experts", "y of rank 0 token"),
    real="NVIDIA/Megatron-LM commit 8b4e00cf25 (#2817)",
)
class BiasByPaddedCounts(ActivatedExperts):
    """Biases are handed out by the counts that rows were padded to, after the padding was removed."""

    def forward(self, delivery: Delivery) -> Tensor:
        pairs = sort_pairs(delivery.ids_RJ, self.placement.held)
        rows = permute(delivery.rows_RD, pairs).split(pairs.counts_E.tolist())
        biases, self.biases = self.biases, None
        out_PD = torch.cat([self.answer(each, n) for n, each in enumerate(rows)])
        self.biases = biases
        if biases is not None:
            padded_E = (pairs.counts_E + 3) // 4 * 4
            out_PD = out_PD + biases.bias_ND.repeat_interleave(padded_E, 0)[: len(out_PD)]
        if delivery.weights_RJ is not None:
            out_PD = weigh(out_PD, delivery.weights_RJ[pairs.token_P, pairs.slot_P])
        return unpermute(out_PD, pairs).reshape(delivery.shape)


@planted(
    Expectation("EXPT-06", "own-biased-even", "finish", "the gradient of bias of expert 0 on rank 1 is zero"),
    layout=EP2_ETP2,
)
class BiasGradientOfOnePart(ExpertBiases):
    """The copies of an output bias that add nothing are left out of the sum of gradients, and stay as they are."""

    replicas = ("edp",)  # type: ignore[assignment]


@planted(Expectation("EXPT-06", "own-biased-even", "finish", "the gradient of bias of expert"), layout=EP2_EDP2)
class BiasGradientNotReduced(ExpertBiases):
    """The gradients of the output biases are not summed over replicas: their module is none of those that are."""

    replicas = ("etp",)  # type: ignore[assignment]


@planted(Expectation("EXPT-06", "own-biased-even", "experts", "likely cause: the inner biases were left out"))
class InnerBiasesDropped(ActivatedExperts):
    """The grouped product has no biases, and those of gate and up are dropped."""

    def answer(self, rows_RD: Tensor, n: int) -> Tensor:
        of = self.units
        gate_RF = None if of.gate_NFD is None else F.linear(rows_RD, of.gate_NFD[n])
        hidden_RF = self.hidden(gate_RF, F.linear(rows_RD, of.up_NFD[n]))
        return F.linear(hidden_RF, of.down_NDF[n], None if self.biases is None else self.biases.added(n))


@planted(Expectation("EXPT-06", "own-biased-even", "experts", "y of rank 0 token"))
class InnerBiasesSwapped(ActivatedExperts):
    """The bias of a fused projection is read as halves where it is interleaved: gate and up get each other's."""

    def named(self, read: Read) -> Iterator[Named]:
        other = {"bias_gate": "bias_up", "bias_up": "bias_gate"}
        return (replace(window, name=other.get(window.name, window.name)) for window in super().named(read))


@planted(Expectation("EXPT-06", "own-biased-even", "gradient", "the gradient of bias of expert"))
class BiasGradientOfNeighbours(ExpertBiases):
    """A part of the gradient of every output bias is handed to all experts of the rank, idle ones too."""

    def added(self, n: int) -> Tensor | None:
        bias_D = super().added(n)
        return None if bias_D is None else bias_D + (self.bias_ND - self.bias_ND.detach()).mean(0)


# ---- activations -------------------------------------------------------------------------------------------------


@planted(Expectation("EXPT-07", "own-geglu-even", "experts", "the activation was gelu (by tanh)"))
class GeluByTanh(ActivatedExperts):
    """GELU is computed by its approximation, whichever was asked for."""

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        asked = self.config.activation
        how = replace(asked, function="gelu_tanh") if asked.function == "gelu" else asked
        return activate(how, gate_RF, up_RF)


@planted(
    Expectation("EXPT-07", "own-clamped-even", "gradient", "gradients passed where the limit cuts"),
    Expectation("EXPT-07", "own-clamped-gpt-oss-even", "gradient", "gradients passed where the limit cuts"),
)
class GradientsPassTheLimit(ActivatedExperts):
    """A fused backward leaves the cut out: gradients pass where the forward cuts."""

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        limit = self.config.activation.limit
        if limit is None or gate_RF is None:
            return super().hidden(gate_RF, up_RF)
        cut_RF, held_RF = gate_RF.clamp(max=limit), up_RF.clamp(-limit, limit)
        gate_RF = gate_RF + (cut_RF - gate_RF).detach()
        up_RF = up_RF + (held_RF - up_RF).detach()
        return activate(replace(self.config.activation, limit=None), gate_RF, up_RF)


@planted(Expectation("EXPT-07", "own-clamped-even", "experts", "the gate was cut to the negative limit too"))
class GateCutOnBothSides(ActivatedExperts):
    """The output of the fused projection is cut to [-limit, limit] as a whole, the gate with it."""

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        limit = self.config.activation.limit
        if gate_RF is not None and limit is not None:
            gate_RF = gate_RF.clamp(min=-limit)
        return super().hidden(gate_RF, up_RF)


@planted(Expectation("EXPT-07", "own-clamped-even", "experts", "up was cut above only"))
class UpCutAbove(ActivatedExperts):
    """up is cut as the gate is: above the limit, and not below its negative."""

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        how = self.config.activation
        if gate_RF is None or how.limit is None:
            return super().hidden(gate_RF, up_RF)
        return activate(replace(how, limit=None), gate_RF.clamp(max=how.limit), up_RF.clamp(max=how.limit))


@planted(Expectation("EXPT-07", "own-clamped-gpt-oss-even", "experts", "the offset 1 was left out"))
class OffsetLeftOut(ActivatedExperts):
    """up is taken as it is, without the offset."""

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        return activate(replace(self.config.activation, offset=0.0), gate_RF, up_RF)


@planted(Expectation("EXPT-07", "own-clamped-gpt-oss-even", "experts", "the slope was 1, not 1.702"))
class SlopeLeftOut(ActivatedExperts):
    """The gate is passed through plain silu."""

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        return activate(replace(self.config.activation, slope=1.0), gate_RF, up_RF)


@planted(Expectation("EXPT-07", "own-ungated-squared-relu-even", "experts", "the activation was relu"))
class ReluNotSquared(ActivatedExperts):
    """Squared ReLU is mapped to ReLU, the only one that the kernel knows."""

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        asked = self.config.activation
        how = replace(asked, function="relu") if asked.function == "squared_relu" else asked
        return activate(how, gate_RF, up_RF)


class _Once(torch.autograd.Function):
    """The square of ReLU, with the derivative of ReLU twice: of rows that it keeps before they are squared."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return F.relu(z).square()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *upstream: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * (z > 0) * upstream[0]  # type: ignore[no-any-return]


@planted(Expectation("EXPT-07", "own-ungated-squared-relu-even", "gradient", "dx of rank 0 token"))
class SquareWithoutItsDerivative(ActivatedExperts):
    """The backward of a fused squared ReLU has 2 for its derivative where it is 2 z."""

    def hidden(self, gate_RF: Tensor | None, up_RF: Tensor) -> Tensor:
        if self.config.activation.function != "squared_relu":
            return super().hidden(gate_RF, up_RF)
        squared: Tensor = _Once.apply(up_RF)  # type: ignore[no-untyped-call]
        return squared
