"""A correct dropless MoE in the style of MegaBlocks: rows by expert, in blocks of 16, without a token drop.

The first half is the library, as somebody writes it for training; the second half is the adapter.
"""

# ruff: noqa: D102 - `contract` says what the methods of the adapter do
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from moe_conformance.contract.claims import Claims

from moe_conformance.contract import (  # isort: skip
    Config, Delivery, Limit, Named, Parametrised, Read, Routing, Topology, Unsupported,
)  # fmt: skip
from moe_conformance.contract import Permuted, Session

# ---- the library ---------------------------------------------------------------------------------------------

BLOCK = 16


def exchange_rows(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send `sent` rows to each rank, and return the rows that came."""
    if group.size() == 1:
        return rows
    return all_to_all_single_autograd(rows.contiguous(), received, sent, group).wait()  # type: ignore[attr-defined, no-any-return]


def padded_places(bins: Tensor, num_bins: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the place of each row when rows are sorted by bin in whole blocks, and the number of rows of a bin."""
    counts = torch.bincount(bins, minlength=num_bins)
    padded = (counts + block - 1) // block * block
    order = torch.sort(bins, stable=True).indices
    sorted_bins = bins[order]
    within = torch.arange(len(bins), device=bins.device) - (counts.cumsum(0) - counts)[sorted_bins]
    places = torch.empty_like(order)
    places[order] = (padded.cumsum(0) - padded)[sorted_bins] + within
    return places, padded


def padded_gather(rows: Tensor, places: Tensor, total: int) -> Tensor:
    """Return rows at their places, and zeros in the padding."""
    return rows.new_zeros(total, rows.shape[1]).index_copy(0, places, rows)


@dataclass(frozen=True)
class Plan:
    """Where every routed row goes, and back."""

    token: Tensor  # of each row that is sent
    slot: Tensor
    weights: Tensor
    tokens: int
    sent: list[int]
    received: list[int]
    places: Tensor  # of each received row in the padded blocks
    rows_per_expert: Tensor  # whole blocks


class DroplessRouter:
    """Sends routed rows to their experts' ranks and lays them out in blocks."""

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        if num_experts < 1 or num_experts % group.size():
            raise ValueError(f"{num_experts} experts on {group.size()} ranks")
        self.group, self.per_rank = group, num_experts // group.size()
        first = group.rank() * self.per_rank
        self.num_experts, self.expert_ids = num_experts, range(first, first + self.per_rank)

    def permute(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Plan]:
        """Return (blocks * 16, D) rows sorted by local expert, and the way back."""
        token, slot = torch.where(ids >= 0)
        expert = ids[token, slot]
        order = torch.sort(expert, stable=True).indices
        token, slot, expert = token[order], slot[order], expert[order]
        sent = torch.bincount(expert // self.per_rank, minlength=self.group.size())
        received = torch.empty_like(sent)
        if self.group.size() > 1:
            dist.all_to_all_single(received, sent, group=self.group)
        else:
            received = sent
        there, here = sent.tolist(), received.tolist()
        rows = exchange_rows(x[token], here, there, self.group)
        bins = self.exchange_ids(expert, here, there) - self.expert_ids[0]
        places, rows_per_expert = padded_places(bins, self.per_rank, BLOCK)
        plan = Plan(token, slot, weights, len(x), there, here, places, rows_per_expert)
        return padded_gather(rows, places, int(rows_per_expert.sum())), plan

    def exchange_ids(self, expert: Tensor, received: list[int], sent: list[int]) -> Tensor:
        """Return the expert of every received row."""
        if self.group.size() == 1:
            return expert
        out = expert.new_empty(sum(received))
        dist.all_to_all_single(out, expert, received, sent, group=self.group)
        return out

    def unpermute(self, blocks: Tensor, plan: Plan) -> Tensor:
        """Return y (T, D): the rows of the blocks, sent back, weighted and added up."""
        rows = exchange_rows(blocks[plan.places], plan.sent, plan.received, self.group)
        weighted = rows * plan.weights[plan.token, plan.slot, None].to(rows.dtype)
        return rows.new_zeros(plan.tokens, rows.shape[1]).index_add(0, plan.token, weighted)


class BlockSparseMLP(nn.Module):
    """SwiGLU experts, each projection one tensor (N * F, D); a block of rows meets the weights of its one expert."""

    def __init__(self, num_experts: int, hidden: int, ffn: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts, self.ffn = num_experts, ffn
        self.w1, self.v1, self.w2 = (
            nn.Parameter(torch.randn(num_experts * ffn, hidden, dtype=dtype) / hidden**0.5) for _ in range(3)
        )

    def forward(self, rows: Tensor, rows_per_expert: Tensor) -> Tensor:
        """Return (rows, D); every expert has whole blocks."""
        if bool((rows_per_expert % BLOCK).any()):
            raise ValueError(f"rows per expert are not in blocks of {BLOCK}: {rows_per_expert.tolist()}")
        expert_of_block = torch.arange(self.num_experts).repeat_interleave(rows_per_expert // BLOCK)
        blocks = rows.view(-1, BLOCK, rows.shape[-1])
        w1, v1, w2 = (w.view(self.num_experts, self.ffn, -1)[expert_of_block] for w in (self.w1, self.v1, self.w2))
        hidden = F.silu(blocks @ w1.transpose(1, 2)) * (blocks @ v1.transpose(1, 2))
        return (hidden @ w2).view_as(rows)


# ---- the adapter ---------------------------------------------------------------------------------------------


class AdaptedExchange:
    """The two halves."""

    def __init__(self, library: DroplessRouter) -> None:
        self.library = library
        self.local_experts = tuple(library.expert_ids)
        self.resolved, self.claims = {"class": type(library).__name__}, Claims(multiple=BLOCK)

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, tuple[Plan, torch.Size]]:
        rows, plan = self.library.permute(x.reshape(-1, x.shape[-1]), routing.ids_TK, routing.weights_TK)
        return Delivery.grouped(rows, plan.rows_per_expert), (plan, x.shape)

    def combine(self, rows: Tensor, handle: tuple[Plan, torch.Size]) -> Tensor:
        plan, shape = handle
        return self.library.unpermute(rows, plan).reshape(shape)


class AdaptedExperts:
    """The block-sparse MLP."""

    def __init__(self, config: Config, expert_ids: Sequence[int]) -> None:
        self.expert_ids = expert_ids
        self.mlp = BlockSparseMLP(len(expert_ids), config.hidden, config.ffn, config.dtype)
        self.resolved = {"class": type(self.mlp).__name__}

    def __call__(self, delivery: Delivery) -> Tensor:
        assert delivery.counts_N is not None
        out: Tensor = self.mlp(delivery.rows_RD, delivery.counts_N)
        return out

    def named(self, read: Read) -> Iterator[Named]:
        for n, expert_id in enumerate(self.expert_ids):
            rows = slice(n * self.mlp.ffn, (n + 1) * self.mlp.ffn)
            yield Named("gate", expert_id, read(self.mlp.w1)[rows])
            yield Named("up", expert_id, read(self.mlp.v1)[rows])
            yield Named("down", expert_id, read(self.mlp.w2)[rows].t())


class AdaptedPermutation:
    """The permutation of one rank, in blocks of any size."""

    def __init__(self, config: Config) -> None:
        self.experts, self.block = config.experts, config.padding.row_multiple
        self.resolved = {"function": "padded_gather"}

    def permute(self, x_TD: Tensor, routing: Routing) -> Permuted:
        token, slot = torch.where(routing.ids_TK >= 0)
        places, rows_per_expert = padded_places(routing.ids_TK[token, slot], self.experts, self.block)
        rows = padded_gather(x_TD[token], places, int(rows_per_expert.sum()))
        return Permuted(rows, rows_per_expert, None, (token, places, routing.weights_TK[token, slot], x_TD.shape))

    def unpermute(self, rows_RD: Tensor, handle: tuple[Tensor, Tensor, Tensor, torch.Size]) -> Tensor:
        token, places, weights, shape = handle
        weighted = rows_RD[places] * weights[:, None].to(rows_RD.dtype)
        return rows_RD.new_zeros(shape).index_add(0, token, weighted)


class BlockSparseSession(Session):
    """One topology on one rank."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def library(self, config: Config) -> DroplessRouter:
        if self.topology.sizes["etp"] > 1:
            raise Unsupported("experts are not sharded: etp > 1")
        return DroplessRouter(config.experts, self.topology.group("ep"))

    def exchange(self, config: Config) -> AdaptedExchange:
        return AdaptedExchange(self.library(config.only("experts", "top_k", "hidden", "dtype")))

    def experts(self, config: Config) -> AdaptedExperts:
        return AdaptedExperts(
            config, self.library(config.only("experts", "top_k", "hidden", "ffn", "dtype")).expert_ids
        )

    def permutation(self, config: Config) -> AdaptedPermutation:
        return AdaptedPermutation(config.only("experts", "top_k", "hidden", "dtype", "padding.row_multiple"))

    def finish_gradients(self, *built: Parametrised) -> None:
        for part in built:
            if isinstance(part, AdaptedExperts):
                for parameter in (each for each in part.mlp.parameters() if each.grad is not None):
                    dist.all_reduce(parameter.grad, group=self.topology.group("edp"))


class BlockSparse:
    """What `--backend self_tests.correct_backends.block_sparse:BlockSparse` names."""

    name: str = "block-sparse"
    variants: tuple[str, ...] = ("default",)
    judged: Mapping[int, int] = {1: 44, 2: 56, 4: 65}

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}

    def limits(self, variant: str) -> Sequence[Limit]:
        return (Limit("wrong_use", (False,), "one rank raises, the others wait", proof="undefined"),)

    def open(self, topology: Topology, device: torch.device) -> Session:
        return BlockSparseSession(topology)
