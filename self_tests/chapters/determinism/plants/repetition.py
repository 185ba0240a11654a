"""DET, GRAD, ROUTE: bugs that no single run shows: each run is right, and two of them differ."""

from __future__ import annotations

import os
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Config, Routing, Topology
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


def _dithered(values: Tensor, generator: torch.Generator | None) -> Tensor:
    """Move some values of bfloat16 by a last place or two."""
    moved = torch.randint(0, 2, values.shape, generator=generator)
    return values * (1 + moved / 128).to(values.dtype)


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


@planted(Expectation("DET-05", "own-even-bfloat16", "experts", "run twice over", "of microbatch 1"), layout=EP2_EDP2)
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
    Expectation("GRAD-10", "own-even-float64", "gradient", "in parameters the loss has the slope"), layout=EP2_EDP2
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
    )
)
class TiesBrokenByRank(Router):
    """Near ties are broken by noise, which every rank draws for itself."""

    def _select(self, scores_TE: Tensor) -> Tensor:
        noise = torch.Generator().manual_seed(dist.get_rank())
        return super()._select(scores_TE * (1 + 0.01 * torch.rand(scores_TE.shape, generator=noise)))


@planted(
    Expectation(
        "ROUTE-13", "route-softmax-normalised", "route", "the first of them alone", "has for expert", "the weight"
    )
)
class ScoresStretchedByTheBatch(Router):
    """Logits are divided by the largest of the batch, so that none overflows."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        logits_TE = super()._logits(x_TD)
        return logits_TE / logits_TE.detach().abs().max() if len(logits_TE) else logits_TE
