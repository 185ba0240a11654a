"""DET, GRAD, ROUTE: bugs that no single run shows: each run is right, and two of them differ."""

# ruff: noqa: D102 - a plant says in its class what its methods do wrong
from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.layer.experts import Experts, swiglu
from moe_conformance.backends.native.layer.gradients import GradientFinisher, Replicated
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Config, Routing, Topology, Unsupported
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


def _dithered(values: Tensor, generator: torch.Generator | None) -> Tensor:
    """Move some values of bfloat16 by a last place or two."""
    moved = torch.randint(0, 2, values.shape, generator=generator)
    return values * (1 + moved / 128).to(values.dtype)


@planted(
    Expectation("DET-01", "own-even-bfloat16", "experts", "run in fresh processes", "y of rank 0 token"),
    layout=EP2_EDP2,
)
class RoundingSeededByTheProcess(AllToAllExchange):
    """Outputs are rounded up or down at random, from a seed that is the number of the process."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return _dithered(super().combine(rows, handle), torch.Generator().manual_seed(os.getpid()))


@planted(Expectation("DET-01", "route-ties", "route", "run in fresh processes, rank 0 token"))
class TiesByProcess(Router):
    """Experts that score the same are told apart by chance, from a seed that is the number of the process."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        chance_TE = torch.rand(scores_TE.shape, generator=torch.Generator().manual_seed(os.getpid()))
        return super()._select(scores_TE.detach() * (1 + 1e-6 * chance_TE))


def _of_process() -> torch.Generator:
    return torch.Generator().manual_seed(os.getpid())


@planted(
    Expectation("DET-01", "route-softmax-normalised", "route", "run in fresh processes", "has its experts in the order")
)
class SlotsByProcess(Router):
    """The experts of a token come in an order that is drawn from a seed: the number of the process."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        ids_TK = super()._select(scores_TE)
        order_TK = torch.rand(ids_TK.shape, generator=_of_process()).argsort(1)
        return ids_TK.gather(1, order_TK)


@planted(Expectation("DET-01", "route-softmax-normalised", "gradient", "run in fresh processes, dx of rank 0 token"))
class RouterGradientByProcess(Router):
    """The gradient of the logits is rounded up or down at random, from a seed that is the number of the process."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        logits_TE = super()._logits(x_TD)
        if logits_TE.requires_grad:
            logits_TE.register_hook(lambda grad_TE: _dithered(grad_TE, _of_process()))
        return logits_TE


@planted(Expectation("DET-01", "forced-random", "route", "run in fresh processes, rank 0 token", " selected ["))
class NoiseByProcess(ForcedRouter):
    """What a strategy draws has the number of the process for a seed."""

    def __init__(self, config: Config, device: torch.device, topology: Topology, number: int) -> None:
        super().__init__(config, device, topology, number)
        self.noise = _of_process()


@planted(Expectation("DET-03", "forced-random", "route", "behind draws of others, rank 0 token", " selected ["))
class NoiseFollowsTheModels(ForcedRouter):
    """The generator of the noise is seeded by where the model's generator stands at the first forward."""

    followed = False

    def _draw(self, own_TE: Tensor) -> Tensor:
        if not self.followed:
            self.followed = True
            self.noise.manual_seed(self.noise.initial_seed() + zlib.crc32(torch.get_rng_state().numpy().tobytes()))
        return super()._draw(own_TE)


@planted(
    Expectation("DET-01", "own-even-bfloat16", "experts", "run in fresh processes", "y of rank 0 token"),
    layout=EP2_EDP2,
)
class RoundingSeededWhereAsked(AllToAllExchange):
    """Where deterministic algorithms are asked for, rounding is drawn from a seed: the number of the process."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        asked = torch.are_deterministic_algorithms_enabled()
        return _dithered(y, torch.Generator().manual_seed(os.getpid())) if asked else y


@planted(
    Expectation("DET-06", "own-even-bfloat16", "run", "run with deterministic algorithms, rank 0 raised in forward:0"),
    layout=EP2_EDP2,
)
class NothingDeterministic(AllToAllExchange):
    """The answers are added up by an algorithm that has no deterministic form, which no limit says."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("combine does not have a deterministic implementation")
        return super().combine(rows, handle)


class RandomUnlessAsked(AllToAllExchange):
    """Rounds at random unless the session is deterministic: no bug, see `DeterministicIfAsked`."""

    asked = False

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y = super().combine(rows, handle)
        return y if self.asked else y * (1 + time.time_ns() % 1024 / 2**20)


class AskedWhenOpened(NativeSession.building(RandomUnlessAsked)):  # type: ignore[misc]
    """Has exchanges work in the mode that it was opened in."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._asked = torch.are_deterministic_algorithms_enabled()

    def exchange(self, config: Config) -> Any:
        built: Any = super().exchange(config)
        built.asked = self._asked
        return built


class DeterministicIfAsked(Native):
    """Native, which gives the same bits with deterministic algorithms and not without."""

    session_class = AskedWhenOpened


@planted(
    Expectation("DET-02", "own-even-bfloat16", "experts", "run with random seed 20000", "y of rank 0 token"),
    layout=EP2_EDP2,
)
class RoundingFromTheModelsGenerator(AllToAllExchange):
    """Outputs are rounded up or down at random, by the generator that belongs to the model."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return _dithered(super().combine(rows, handle), None)


@planted(
    Expectation("DET-05", "own-even-bfloat16", "experts", "run twice over", "of microbatch 1"),
    layout=EP2_EDP2,
)
class AnotherKernelOnceWarm(AllToAllExchange):
    """The first step tries kernels out, and the later ones run the quickest, which rounds weights to bfloat16."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        self._warm = False

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        weights_P = super()._weights(routing, pairs)
        warm, self._warm = self._warm, True
        return weights_P.to(torch.bfloat16).to(weights_P.dtype) if warm else weights_P


@planted(
    Expectation(
        "DET-05",
        "own-even-bfloat16",
        "finish",
        "run twice over",
        "after finishing step 1 differs from the original run",
    ),
    Expectation("GRAD-11", "own-accumulated-even-bfloat16", "finish", "a step of its own, in step 1 the gradient of"),
    layout=EP2_EDP2,
)
class ReducedOnce(GradientFinisher):
    """What was reduced is marked, so that nothing is reduced twice, and the mark stays when gradients are cleared."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        new = [module for module in modules if not getattr(module, "reduced", False)]
        super().finish(new)
        for module in new:
            module.reduced = True  # type: ignore[assignment]


@planted(
    Expectation(
        "DET-05",
        "own-even-bfloat16",
        "finish",
        "run twice over",
        "after finishing step 1 differs from the original run",
    ),
    Expectation("GRAD-11", "own-accumulated-even-bfloat16", "finish", "a step of its own, in step 1 the gradient of"),
    layout=EP2_EDP2,
)
class SumsOfAllSteps(GradientFinisher):
    """Finished gradients are summed up in buffers that nobody clears when gradients are cleared."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        every = list(modules)
        super().finish(every)
        for parameter in (parameter for module in every for parameter in module.parameters()):
            assert parameter.grad is not None
            parameter.total = getattr(parameter, "total", 0) + parameter.grad  # type: ignore[attr-defined]
            parameter.grad.copy_(parameter.total)  # type: ignore[attr-defined]


@planted(
    Expectation("GRAD-11", "own-accumulated-even-bfloat16", "finish", "a step of its own, in step 1 the gradient of"),
    layout=EP2_EDP2,
)
class GradientsOfTheFirstStep(GradientFinisher):
    """What the first step ended with is handed out in every later one."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        every = list(modules)
        super().finish(every)
        for parameter in (parameter for module in every for parameter in module.parameters()):
            assert parameter.grad is not None
            parameter.first = getattr(parameter, "first", parameter.grad.clone())  # type: ignore[attr-defined]
            parameter.grad.copy_(parameter.first)  # type: ignore[attr-defined]


@planted(
    Expectation(
        "DET-05",
        "own-even-bfloat16",
        "finish",
        "run twice over",
        "after finishing step 1 is missing; it exists in the original run",
    ),
    Expectation("GRAD-11", "own-accumulated-even-bfloat16", "finish", "a step of its own, no gradient was finished"),
    layout=EP2_EDP2,
)
class OneStepAModule(GradientFinisher):
    """The gradients of a module are finished once, and refused from then on, without a limit that says so."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        every = list(modules)
        if any(getattr(module, "finished_before", False) for module in every):
            raise Unsupported("gradients are finished once")
        super().finish(every)
        for module in every:
            module.finished_before = True  # type: ignore[assignment]


class AddsInPlace(Experts):
    """Weight gradients are added two rows at a time to where they lie, as fused kernels do: no bug, see `InPlace`."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        stacked = (self.gate_NFD, self.up_NFD, self.down_NDF)
        return torch.cat(
            [
                swiglu(chunk_RD, *(_added_in_place(each, n) for each in stacked))
                for n, rows in enumerate(rows_PD.split(counts_N))
                for chunk_RD in rows.split(2)
            ]
        )


def _added_in_place(stacked: Tensor, n: int) -> Tensor:
    """Return matrix n, whose gradient is added to what is there as soon as it comes."""
    matrix = stacked.detach()[n].requires_grad_()

    def add(gradient: Tensor) -> None:
        if stacked.grad is None:
            stacked.grad = torch.zeros_like(stacked)
        stacked.grad[n] += gradient

    matrix.register_hook(add)
    return matrix


class InPlace(Native):
    """Native, with experts that add their gradients in place."""

    session_class = NativeSession.building(AddsInPlace)


class KnowsWhoCameLast(AllToAllExchange):
    """The base of plants for which it counts who comes to the exchange last."""

    _last = False

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        group = self.topology.group("ep")
        times = [0.0] * group.size()
        dist.all_gather_object(times, time.time(), group=group)  # behind it nobody is late any more
        self._last = max(times) == times[group.rank()]
        return super().dispatch(x, routing)


@planted(Expectation("DET-06", "own-even-bfloat16", "experts", "late, y of rank"), layout=EP2_EDP2)
class LatecomersSendLess(KnowsWhoCameLast):
    """The rank that comes last to the exchange sends its answers without their last bit: what rounding may do too."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        if self._last:
            less = (rows.detach().view(torch.int16) & ~1).view(rows.dtype)
            rows = rows + (less - rows).detach()
        return super().combine(rows, handle)


@planted(Expectation("DET-06", "own-even-bfloat16", "experts", "late, y of rank"), layout=EP2_EDP2)
class AnswersAddedAsTheyCome(KnowsWhoCameLast):
    """The answers of one expert after the other are added to the tokens, and by latecomers the other way round."""

    def _unpermute(self, rows_QD: Tensor, permuted: Permuted) -> Tensor:
        pairs, counts = permuted.pairs, permuted.pairs.counts_E.tolist()
        rows_PD = self._weigh(rows_QD, permuted.weights_P)
        y_TD = rows_PD.new_zeros(pairs.shape[0], rows_PD.shape[1])
        answers = list(zip(pairs.token_P.split(counts), rows_PD.split(counts), strict=True))
        for token_p, rows_pD in reversed(answers) if self._last else answers:
            y_TD = y_TD + torch.zeros_like(y_TD).index_add(0, token_p, rows_pD)
        return y_TD.reshape(permuted.shape)


@planted(
    Expectation(
        "GRAD-15",
        "own-even-bfloat16",
        "finish",
        "that ask for no gradient, gate of expert",
        "of zeros instead of None, and had none",
    ),
    layout=EP2_EDP2,
)
class FrozenFilledWithZeros(GradientFinisher):
    """Gradients that are absent become zeros, also those of frozen parameters, which weight decay then moves."""

    def finish(self, modules: Iterable[Replicated]) -> None:
        every = list(modules)
        for parameter in (parameter for module in every for parameter in module.parameters()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().finish(every)


@planted(
    Expectation("GRAD-15", "own-even-bfloat16", "gradient", "x that ask for no gradient", "dweights of rank 0"),
    layout=EP2_EDP2,
)
class BackwardOnlyForTokens(AllToAllExchange):
    """The backward of the exchange is set up where tokens ask for a gradient, and gives weights theirs only then."""

    def dispatch(self, x: Tensor, routing: Routing) -> Any:
        if not x.requires_grad:
            detached = routing.weights_TK.detach()
            routing = Routing(routing.ids_TK, detached, routing.experts)
        return super().dispatch(x, routing)


@planted(
    Expectation("GRAD-10", "own-even-float64", "gradient", "in parameters the loss has the slope"),
    layout=EP2_EDP2,
)
class GateGradientOfASigmoid(Experts):
    """The backward of the gate has the slope of a sigmoid where it should have that of silu."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        weights = zip(self.gate_NFD.unbind(), self.up_NFD.unbind(), self.down_NDF.unbind(), strict=True)
        outputs = []
        for rows, (gate, up, down) in zip(rows_PD.split(counts_N), weights, strict=True):
            hidden = functional.linear(rows, gate)
            sloped = functional.silu(hidden).detach() + hidden.sigmoid() - hidden.sigmoid().detach()
            outputs.append(functional.linear(sloped * functional.linear(rows, up), down))
        return torch.cat(outputs)


@planted(
    Expectation(
        "ROUTE-12", "route-near-ties", "route", "the tokens of rank 0 on every rank", "rank 1 token", "selected"
    ),
)
class TiesBrokenByRank(Router):
    """Near ties are broken by noise, which every rank draws for itself."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        noise = torch.Generator().manual_seed(dist.get_rank())
        return super()._select(scores_TE * (1 + 0.01 * torch.rand(scores_TE.shape, generator=noise)))


@planted(
    Expectation(
        "ROUTE-13", "route-softmax-normalised", "route", "the first of them alone", "has for expert", "the weight"
    ),
)
class ScoresStretchedByTheBatch(Router):
    """Logits are divided by the largest of the batch, so that none overflows."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        logits_TE = super()._logits(x_TD)
        return logits_TE / logits_TE.detach().abs().max() if len(logits_TE) else logits_TE
