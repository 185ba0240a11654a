"""GRAD: bugs on the way of the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.layer.experts import Experts, in_blocks
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Config, Delivery, Routing, Topology
from moe_conformance.contract.topology import Layout
from self_tests.planted_bugs.plant import EP2_EDP2, EP2_ETP2, TP2_EP2, Expectation, planted

# ---- through the exchange ------------------------------------------------------------------------------------------


@planted(
    Expectation(
        "GRAD-01", "even", "gradient", "backward of combine", "upstream gradients: rank 0 token 0; expected: 0."
    ),
    Expectation(
        "GRAD-02", "even", "gradient", "first wrong: the gradient at the experts' output (backward of combine)"
    ),
)
class UnweightedBackward(AllToAllExchange):
    """The backward of combine leaves the routing weights out."""

    def _weigh(self, rows_PD: Tensor, weights_P: Tensor) -> Tensor:
        return super()._weigh(rows_PD.detach(), weights_P) + (rows_PD - rows_PD.detach())


@planted(
    Expectation("GRAD-01", "even", "gradient", "reached the experts' output; likely cause: combine detached it"),
    Expectation(
        "GRAD-02", "even", "gradient", "first wrong: the experts' output has no gradient (combine detached it)"
    ),
)
class CombineDetached(AllToAllExchange):
    """The answers are detached from the experts."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows.detach(), handle)


@planted(Expectation("GRAD-02", "even", "gradient", "slot 1", "the gradient of expert", "(backward of dispatch)"))
class OneSlotsGradient(AllToAllExchange):
    """The backward of dispatch keeps the gradient of the first slot alone."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        rows_PD, permuted = super()._permute(x, routing, room)
        return torch.where(permuted.pairs.slot_P[:, None] == 0, rows_PD, rows_PD.detach()), permuted


@planted(
    Expectation(
        "GRAD-02", "even", "gradient", "every element of dx is 2.000 x", "shard 0 alone", "(backward of dispatch)"
    ),
    real="pytorch/torchtitan commit 3ff755178 (#1878)",
    layout=EP2_ETP2,
)
class ShardsGradientsNotSummed(AllToAllExchange):
    """The gradient of a row that went to all shards of an expert is taken from one of them."""

    def _regroup(self, rows_RD: Tensor, order_R: Tensor) -> Tensor:
        rows_RD.register_hook(lambda gradient: gradient * (self.topology.group("etp").rank() == 0))
        return super()._regroup(rows_RD, order_R)


@planted(
    Expectation("GRAD-03", "even", "gradient", "the gradient of the weights on rank 0 in microbatch 0 is None"),
    real="NVIDIA/Megatron-LM commit 3b1521e29c (#4500)",
)
class WeightsDetached(AllToAllExchange):
    """Combine takes the weights from a copy without history."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        return super()._weights(routing, pairs).detach()


@planted(
    Expectation("GRAD-03", "even", "gradient", "the gradients of the token are shifted by 1 slot"),
    Expectation("GRAD-04", "own-even", "gradient", "dweights"),
)
class WeightGradientsOneSlotOff(AllToAllExchange):
    """A weight gets the gradient of its neighbour."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        neighbours_P = routing.weights_TK.roll(1, dims=1)[pairs.token_P, pairs.slot_P]
        return super()._weights(routing, pairs).detach() + (neighbours_P - neighbours_P.detach())


@planted(Expectation("GRAD-07", "one-by-one-uneven", "gradient", "the gradient of x on rank 0, microbatch 0, was"))
class GradientRecycled(AllToAllExchange):
    """The memory of a returned gradient is cleared for the next microbatch."""

    latest: Tensor | None = None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        if self.latest is not None and self.latest.grad is not None:
            self.latest.grad.zero_()
        self.latest = x
        return super().dispatch(x, routing)


# ---- in the backend's own experts ----------------------------------------------------------------------------------


@planted(
    Expectation(
        "GRAD-04", "own-even", "gradient", "dx is wrong; likely cause: no gradient passed through the gate; for example"
    ),
    Expectation("GRAD-05", "own-even", "gradient", "every gradient of gate is zero"),
)
class GateDetached(Experts):
    """Nothing flows back through the activation."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        outputs = []
        for rows, gate, up, down in zip(
            rows_PD.split(counts_N), self.gate_NFD, self.up_NFD, self.down_NDF, strict=True
        ):
            outputs.append(F.linear(F.silu(F.linear(rows, gate)).detach() * F.linear(rows, up), down))
        return torch.cat(outputs)


@planted(
    Expectation(
        "GRAD-11", "own-accumulated-even-bfloat16", "finish", "is not the sum over the microbatches, each run alone"
    ),
    Expectation(
        *(
            "GRAD-05",
            "own-accumulated-even",
            "gradient",
            "gate of expert 0",
            "likely cause: only microbatch 1 is in it",
        ),
        "22 more of the same kind",
    ),
    real="NVIDIA/TransformerEngine PR #2142",
)
class OnlyLastMicrobatch(Experts):
    """The gradient of a microbatch overwrites that of the one before."""

    def forward(self, delivery: Delivery) -> Tensor:
        self.zero_grad()
        return super().forward(delivery)


# ---- between the last backward and the step ------------------------------------------------------------------------


class ExpertFinisher(GradientFinisher):
    """Native's finisher, for plants that change what becomes of the gradients of experts alone."""

    def _summed(self, gradient: Tensor, replicas: tuple[str, ...]) -> Tensor:
        return self._of_expert(gradient) if replicas == Experts.replicas else super()._summed(gradient, replicas)

    def _of_expert(self, gradient: Tensor) -> Tensor:
        return self._over("edp", gradient)

    def _over(self, group: str, gradient: Tensor) -> Tensor:
        return super()._summed(gradient, (group,))


@planted(
    Expectation("GRAD-05", "own-even", "finish", "every expert gradient is 2.000 x the expected value: ep or"),
    real="pytorch/torchtitan commits 59e57a4bb (#1551), f014f31c2 (#1793)",
)
class ExpertGradientsTimesEp(ExpertFinisher):
    """What was divided by the few replicas of an expert keeps a factor of ep."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        return self._over("edp", gradient) * self.topology.sizes["ep"]


@planted(
    Expectation("GRAD-05", "own-even", "finish", "is 0.500 x the expected value: 1/ep or 1/edp"),
    real="NVIDIA/Megatron-LM commit f8ec15e4a8 (#5956); deepspeedai/DeepSpeed commits b647fb247, e5dd5501c",
    layout=EP2_EDP2,
)
class MeanOverReplicas(ExpertFinisher):
    """Expert gradients are averaged over the expert's replicas, not summed."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        return self._over("edp", gradient) / self.topology.sizes["edp"]


@planted(
    Expectation("GRAD-05", "own-even", "finish", "every expert gradient is 0.250 x the expected value: 1/dp"),
    real="deepspeedai/DeepSpeed commit 9d2660d2a (#4957)",
    layout=EP2_EDP2,
)
class DividedOnceMore(ExpertFinisher):
    """Expert gradients are divided by the data parallel size although nothing else is."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        return self._over("edp", gradient) / self.topology.sizes["dp"]


@planted(
    Expectation("GRAD-05", "own-input-weights-even", "finish", "every expert gradient is 0.500 x the expected value"),
    real="NVIDIA/Megatron-LM commit 4f8974a400 (!2564)",
    layout=TP2_EP2,
)
class DividedByEpForTheReplicas(ExpertFinisher):
    """A mean over dp is made of a mean over the replicas by 1 / ep, which is edp / dp only where etp = tp."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        sizes = self.topology.sizes
        mean = self._over("edp", gradient) / sizes["edp"] / sizes["ep"]
        return mean * sizes["dp"] * sizes["cp"]


@planted(
    Expectation("GRAD-05", "own-even", "finish", "it was not reduced over ranks"),
    real="radixark/Megatron-LM PR #82",
    layout=Layout(2, tp=2),
)
class NothingToReduceWithoutDenseReplicas(ExpertFinisher):
    """Where dp * cp = 1 no gradient is summed over dp, those of experts neither, whose replicas are ranks of tp."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        return self._over("edp", gradient) if self.topology.group("dp_cp").size() > 1 else gradient


@planted(
    Expectation("GRAD-18", "shared-even", "finish", "every expert gradient is 0.500 x the expected value"),
    real="NVIDIA/Megatron-LM PR #7165",
    layout=Layout(4, cp=2, ep=2),
)
class DividedWithoutCp(ExpertFinisher):
    """A divisor of all data parallel ranks is taken back by those of dp, and ranks of cp are forgotten."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        return self._over("edp", gradient) / self.topology.group("dp_cp").size() * self.topology.sizes["dp"]


class _TakenBackOnce(ExpertFinisher):
    def _of_expert(self, gradient: Tensor) -> Tensor:
        return self._over("edp", gradient) * self.topology.group("dp_cp").size()


@planted(
    Expectation("GRAD-05", "own-accumulated-even", "gradient", "gate of expert 0"),
    real="NVIDIA/Megatron-LM commits 3373641ff1, c13f08a11b",
    layout=EP2_EDP2,
    also=(_TakenBackOnce,),
)
class DividedWithEveryBackward(Experts):
    """A hook divides the gradient after every backward, what the ones before have left included."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        self.ranks = topology.group("dp_cp").size()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._divide)

    def _divide(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.div_(self.ranks)


@planted(
    Expectation("GRAD-05", "own-even", "finish", "likely cause: it is the sum over experts [0, 4]", "gate of expert 0"),
    real="NVIDIA/Megatron-LM issue #1628; NVIDIA/Megatron-LM commits cd4afffa64 (#5916), abf04f46e3 (#6080)",
    layout=EP2_EDP2,
)
class ReducedOverDenseGroups(ExpertFinisher):
    """Expert gradients are reduced over the ranks of the dense parameters, whatever expert these hold."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        return self._over("dp_cp", gradient)


@planted(
    Expectation("GRAD-05", "own-one-expert-even", "finish", "only the tokens of its own ep_etp"),
    real="NVIDIA/Megatron-LM issue #1628",
    layout=EP2_EDP2,
)
class ReplicasNotReduced(ExpertFinisher):
    """Replicas of an expert keep the gradient of the tokens that reached them."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        return gradient


@planted(Expectation("GRAD-08", "own-even", "finish", "expert 0", "rank"), layout=EP2_EDP2)
class PeersInBfloat16(ExpertFinisher):
    """What comes from the other replicas is rounded to bfloat16 on the way; a rank's own gradient is not."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        peers = self._over("edp", gradient.clone()) - gradient
        return gradient + peers.bfloat16()


@planted(Expectation("GRAD-06", "own-empty-expert-even", "finish", "gate of expert 1 on rank 0 received no token"))
class Leftover(ExpertFinisher):
    """The gradient of an expert without tokens is memory that nobody cleared."""

    def _of_expert(self, gradient: Tensor) -> Tensor:
        return self._over("edp", gradient).masked_fill((gradient == 0).all(dim=(1, 2), keepdim=True), 0.125)


class _AbsentStaysAbsent(GradientFinisher):
    def finish(self, modules: Iterable[Replicated]) -> None:
        super().finish([module for module in modules if all(p.grad is not None for p in module.parameters())])


@planted(
    Expectation("GRAD-06", "own-idle-rank-even", "finish", "on rank 1", "has the gradient None instead of zeros"),
    also=(_AbsentStaysAbsent,),
)
class IdleExpertsSkipped(Experts):
    """A rank whose experts got nothing skips them, and their gradients stay absent."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        return super()._loop(rows_PD, counts_N) if len(rows_PD) else rows_PD


class _PastAutograd(torch.autograd.Function):
    """A parameter as it is, whose backward adds to its `grad` and tells autograd nothing."""

    @staticmethod
    def forward(ctx: Any, asked: Tensor, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return parameter.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        before, gradient = ctx.parameter.grad, gradients[0].to(ctx.parameter.grad_dtype, copy=True)
        ctx.parameter.grad = gradient if before is None else before + gradient
        return None, None


@planted(
    Expectation("GRAD-11", "own-hooked-even", "gradient", "the hook of down of expert", "was passed no gradient"),
    layout=EP2_EDP2,
)
class GradientsPastAutograd(Experts):
    """The backward of the last product adds to `grad` itself, and hands hooks of the parameter nothing."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        asked = torch.zeros((), requires_grad=True)
        down_NDF: Tensor = _PastAutograd.apply(asked, self.down_NDF)  # type: ignore[no-untyped-call]
        weights = zip(self.gate_NFD.unbind(), self.up_NFD.unbind(), down_NDF.unbind(), strict=True)
        return torch.cat([in_blocks(rows, *w) for rows, w in zip(rows_PD.split(counts_N), weights, strict=True)])


_WORKLOAD = "own-small-gradients-even-bfloat16"


@planted(Expectation("GRAD-17", _WORKLOAD, "finish", "partial sums are rounded below float32"))
class AccumulatedInBfloat16(Experts):
    """Gradients are accumulated in the dtype of their parameters, as autograd does by itself."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        nn.Module.register_parameter(self, name, param)


@planted(Expectation("GRAD-17", _WORKLOAD, "finish", "is not the sum over 16 microbatches"), layout=EP2_EDP2)
class AccumulatorRoundedAfterEveryBackward(Experts):
    """The accumulator is float32, and is stored in the dtype of the parameter after every backward."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None:
            param.register_post_accumulate_grad_hook(self._store)

    def _store(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.to(parameter.dtype))
