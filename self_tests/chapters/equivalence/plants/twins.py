"""EXCH: bugs that break a law between two runs: some are right wherever one run alone is judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllGatherExchange, AllToAllExchange, Permuted
from moe_conformance.backends.native.layer.experts import Experts, in_blocks
from moe_conformance.backends.native.row_ops.permutation import Pairs
from moe_conformance.contract import Config, Routing, Topology
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted


def _as_if_contiguous(values: Tensor) -> Tensor:
    """Read a matrix from its first element on, row after row, as far as there is memory."""
    T, n = values.shape
    start, end = values.storage_offset(), values.untyped_storage().nbytes() // values.element_size()
    if end - start < T * n:
        return values
    return values.as_strided((T, n), (n, 1))


# ---- order and numbers ---------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-13", "even", "combine", "tokens and slots in another order"),
    real="huggingface/transformers PR #45473",
)
class IdsSortedWithoutTheirWeights(AllToAllExchange):
    """The ids of a token are sorted, and the weights beside them stay as they were."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        return super()._permute(x, replace(routing, ids_TK=routing.ids_TK.sort(dim=1).values), room)


@planted(
    Expectation("EXCH-14", "even", "combine", "with experts under other numbers"),
    Expectation("EXCH-14", "own-even-bfloat16", "experts", "with experts under other numbers"),
    real="huggingface/transformers PR #40545",
)
class ExpertZeroIsNobody(AllToAllExchange):
    """The fill value of slots that are not served is zero, and so is the number of an expert."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        return super()._permute(x, replace(routing, ids_TK=torch.where(routing.ids_TK == 0, -1, routing.ids_TK)), room)


# ---- weights -------------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-16", "even", "combine", "with all weights of a token times a power of two"),
    Expectation("EXCH-16", "own-even-bfloat16", "experts", "with all weights of a token times a power of two"),
)
class WeightsCutAtOne(AllToAllExchange):
    """Weights are taken to be probabilities, and cut off where a routing scale makes them larger than one."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        return super()._weights(routing, pairs).clamp_max(1)


# ---- memory --------------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-17", "even", "dispatch", "with x transposed", "rows delivered to rank 0 differ"),
    Expectation("EXCH-17", "own-even-bfloat16", "experts", "with x transposed", "y of rank 0 token 0"),
    real="pytorch/torchtitan commit f713a0254 (#3771)",
    layout=EP2_EDP2,
)
class TokensReadAsIfContiguous(AllToAllExchange):
    """A kernel takes the pointer of the tokens and not their strides."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        x_TD = x.reshape(-1, x.shape[-1])
        return super()._permute(_Misread.apply(x_TD), routing, room)  # type: ignore[no-untyped-call]


class _Misread(torch.autograd.Function):
    """Reads the memory of its input on, row after row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return _as_if_contiguous(values).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@planted(
    Expectation("EXCH-17", "even", "gradient", "upstream every second row", "dx of rank 0 token 1"),
    real="pytorch/torchtitan commit f713a0254 (#3771)",
)
class UpstreamReadAsIfContiguous(AllToAllExchange):
    """The backward of combine takes the pointer of the gradient: that of a sum is one number."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        y: Tensor = _MisreadBackward.apply(super().combine(rows, handle))  # type: ignore[no-untyped-call]
        return y


class _MisreadBackward(torch.autograd.Function):
    """Reads the memory of its gradient on, row after row; past the end there are zeros."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        memory = gradient.as_strided((gradient.untyped_storage().nbytes() // gradient.element_size(),), (1,), 0)
        read = torch.zeros(gradient.numel(), dtype=gradient.dtype)
        read[: len(memory)] = memory[: gradient.numel()]
        return read.reshape(gradient.shape)


# ---- places --------------------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-15", "even", "combine", "run on single", "y of rank 0 token 0"),
    Expectation("EXCH-15", "own-even-bfloat16", "experts", "run on single", "y of rank 0 token 0"),
    real="NVIDIA/Megatron-LM commit a98c5ba19c",
)
class OneSlotWithoutPeers(AllToAllExchange):
    """Where all experts are at home, the exchange is left out, and with it all slots but the first."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        if self.topology.group("ep_etp").size() == 1:
            ids_TK = routing.ids_TK.clone()
            ids_TK[:, 1:] = -1
            routing = replace(routing, ids_TK=ids_TK)
        return super()._permute(x, routing, room)


@planted(
    Expectation("EXCH-13", "even", "combine", "tokens and slots in another order"),
    Expectation(
        "EXCH-15", "even", "combine", "the tokens of the next rank", "instead of 0 in the original run (rank 0 token 0"
    ),
    layout=EP2_EDP2,
)
class FirstTokenOfTheWorldIsMissing(AllToAllExchange):
    """The first token of the first rank is taken for one that begins a text, which no expert has to see."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        ids_TK = routing.ids_TK.clone()
        if self.topology.rank == 0:
            ids_TK[:1] = -1
        return super()._permute(x, replace(routing, ids_TK=ids_TK), room)


@planted(
    Expectation("EXCH-43", "even", "combine", "run through alltoall", "y of rank 0 token 0"),
    Expectation("EXCH-43", "own-even-bfloat16", "experts", "run through alltoall", "y of rank 0 token 0"),
)
class MeanOverTheGatheringRanks(AllGatherExchange):
    """The answers of the ranks are averaged, as those of replicas would be."""

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        return super().combine(rows, handle) / self.topology.group("ep_etp").size()


# ---- what came before ----------------------------------------------------------------------------------------------


@planted(
    Expectation("EXCH-40", "even", "combine", "run in turn with one-expert-even", "y of rank 0 token 0"),
    real="microsoft/Tutel commit ce19abd (#12)",
)
class KernelOfTheLatestExchange(AllToAllExchange):
    """Kernels are made for a number of slots and kept by the number of experts alone: the latest serves all."""

    _slots: ClassVar[dict[int, int]] = {}

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        self._slots[config.experts] = config.top_k

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        weights_P = super()._weights(routing, pairs)
        return weights_P * (pairs.slot_P < self._slots[routing.experts])


@planted(Expectation("EXCH-40", "own-even-bfloat16", "experts", "run in turn with own-even-float64", "y of rank 0"))
class ExactOnceAskedTo(Experts):
    """Products are in double precision for all experts of a process once some asked for it, and rounded once."""

    _exact: ClassVar[list[bool]] = []

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        if rows_PD.dtype == torch.float64:
            self._exact.append(True)
        if not self._exact:
            return super()._loop(rows_PD, counts_N)
        weights = zip(*(each.double().unbind() for each in (self.gate_NFD, self.up_NFD, self.down_NDF)), strict=True)
        parts = zip(rows_PD.double().split(counts_N), weights, strict=True)
        return torch.cat([in_blocks(rows, *w) for rows, w in parts]).to(rows_PD.dtype)


class NotInDouble(Experts):
    """No product is in double precision, as with kernels that have none: no bug of turns, see `WithoutDouble`."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        if rows_PD.dtype == torch.float64:
            raise ValueError("there is no kernel for float64")
        return super()._loop(rows_PD, counts_N)


class WithoutDouble(Native):
    """Native, without products in double precision."""

    session_class = NativeSession.building(NotInDouble)


@planted(Expectation("EXCH-40", "own-even-bfloat16", "run", "run in turn with own-even-float64", "is for 4 bytes"))
class KernelForTheFirst(Experts):
    """A kernel is made for the first experts of a process that are built, and has no room for wider numbers later."""

    _room: ClassVar[list[int]] = []

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        self._room.append(max(4, rows_PD.itemsize))
        if rows_PD.itemsize > self._room[0]:
            raise ValueError(f"the kernel is for {self._room[0]} bytes")
        return super()._loop(rows_PD, counts_N)


@planted(
    Expectation(
        *("PACK-09", "even", "combine"),
        *("run in two packs of other order", "token 2", "is 0 instead of", "in the original run"),
    ),
    Expectation("PACK-09", "own-even-bfloat16", "experts", "run in two packs of other order", "of microbatch 1"),
)
class OutputAsLongAsTheFirstPack(AllToAllExchange):
    """The memory of the output is made for the first pack, and of a longer one the end is left out."""

    def __init__(self, config: Config, topology: Topology) -> None:
        super().__init__(config, topology)
        self._tokens: int | None = None

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        y = super()._unpermute(rows_PD, permuted)
        self._tokens = len(y) if self._tokens is None else self._tokens
        there_T = torch.arange(len(y)) < self._tokens
        return torch.where(there_T[:, None], y, 0)


@planted(Expectation("EXCH-16", "even", "gradient", "with all weights of a token times a power of two"))
class WeightGradientsTimesTheWeight(AllToAllExchange):
    """The gradient of a routing weight is multiplied by the weight, as that of its logarithm would be."""

    def _weights(self, routing: Routing, pairs: Pairs) -> Tensor:
        weights_P = super()._weights(routing, pairs)
        if weights_P.requires_grad:
            weights_P = weights_P.clone()
            weights_P.register_hook(lambda gradient_P: gradient_P * weights_P.detach())
        return weights_P
