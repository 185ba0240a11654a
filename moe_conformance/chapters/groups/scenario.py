"""Run a small model on the ranks, in pipeline stages: dense parts of the suite and MoE layers of the backend.

Every block is a causal mean over the sequence, a linear map cut over tp with sequence parallelism, and the backend's
MoE: its layer if there are shared experts, else its router, exchange and experts. A sequence is split over the ranks of
a cp and tp group, with cp as the slower axis; pipeline stages send their outputs to the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.contract import Parametrised, Session, Unsupported, whole
from moe_conformance.contract.topology import Topology
from moe_conformance.engine import RankContext
from moe_conformance.scenarios import parameters
from moe_conformance.scenarios.outcome import Grad, Microbatch, RankOutcome
from moe_conformance.scenarios.reported import claims_of_all, shown_of, without_noise
from moe_conformance.scenarios.sessions import build, opened
from moe_conformance.scenarios.tensors import to_cpu
from moe_conformance.workloads.records.workload import ParameterKey, Workload

BLOCKS = 2
_MIX = (("mix_in", 0), ("mix_out", 1))  # names, and the dimension that tp shards


class _Gather(torch.autograd.Function):
    """Gathers the tokens of all ranks of a group; its backward sums their gradients and keeps a rank's part."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, start: int, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.place, ctx.group = slice(start, start + len(mine)), group
        return _everywhere(mine, ctx.place, total, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.place], None, None, None


class _ReduceScatter(torch.autograd.Function):
    """Sums partial results over the ranks of a group and keeps a rank's tokens; its backward gathers."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, start: int, mine: int, group: dist.ProcessGroup) -> Tensor:
        ctx.place, ctx.group, ctx.total = slice(start, start + mine), group, len(parts)
        summed = parts.clone()
        dist.all_reduce(summed, group=group)
        return summed[ctx.place].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _everywhere(gradients[0], ctx.place, ctx.total, ctx.group), None, None, None


def _everywhere(mine: Tensor, place: slice, total: int, group: dist.ProcessGroup) -> Tensor:
    everything = mine.new_zeros(total, *mine.shape[1:])
    everything[place] = mine
    dist.all_reduce(everything, group=group)
    return everything


class ProxyModel:
    """The scenario of the proxy model: the state of one run on one rank."""

    def __init__(self, context: RankContext, workload: Workload) -> None:
        """Store the arguments; nothing runs yet."""
        self.context, self.workload, self.config = context, workload, workload.config
        self.reached = "open"

    def run(self, backend_name: str) -> RankOutcome:
        """Run the model and return the record of this rank: y on the last stage, the gradient of x on the first."""
        session = self.build(backend_name)
        microbatches = range(len(self.workload.batches))
        ends = {}
        for m in microbatches:
            self.reached = f"forward:{m}"
            ends[m] = self.forward(m)
        for m in microbatches:
            self.reached = f"backward:{m}"
            self.backward(m, *ends[m])
        return self._bring_back(session, ends)

    def build(self, backend_name: str) -> Session:
        """Build the blocks of this rank's stage, and return their session."""
        kept = opened(self.context, backend_name, self.workload.layout)
        self.topology = kept.topology
        self.reached = "build"
        stages = self.topology.ranks("pp")
        stage, blocks_per_stage = stages.index(self.topology.rank), BLOCKS // len(stages)
        self.blocks = [
            Block(self, kept.session, number)
            for number in range(stage * blocks_per_stage, (stage + 1) * blocks_per_stage)
        ]
        self.before = stages[stage - 1] if stage else None
        self.after = stages[stage + 1] if stage + 1 < len(stages) else None
        return kept.session

    def forward(self, m: int) -> tuple[Tensor, Tensor]:
        """Return the input and the output of this stage, and send the output to the next stage."""
        batch = self.workload.batches[m][self.context.rank]
        h = batch.x_TD.to(self.context.device, copy=True)
        if self.before is not None:
            dist.recv(h, src=self.before, group=self.topology.group("pp"))
        x = h.requires_grad_()
        for block in self.blocks:
            h = block(h, m)
        if self.after is not None:
            dist.send(h.detach().contiguous(), dst=self.after, group=self.topology.group("pp"))
        return x, h

    def upstream(self, m: int, y: Tensor) -> Tensor:
        """Return the upstream gradient of the last stage's output, from the workload."""
        del y
        return self.workload.batches[m][self.context.rank].upstream.to(self.context.device, copy=True)

    def backward(self, m: int, x: Tensor, y: Tensor) -> None:
        """Run the backward of this stage, and send the gradient of its input to the stage before."""
        gradient = self.upstream(m, y)
        if self.after is not None:
            dist.recv(gradient, src=self.after, group=self.topology.group("pp"))
        torch.autograd.backward(y, gradient)
        if self.before is not None:
            assert x.grad is not None
            dist.send(x.grad.contiguous(), dst=self.before, group=self.topology.group("pp"))

    def _bring_back(self, session: Session, ends: Mapping[int, tuple[Tensor, Tensor]]) -> RankOutcome:
        self.reached = "finish"
        final: dict[ParameterKey, Grad] = {}
        refusal = None
        try:
            session.finish_gradients(*(surface for block in self.blocks for surface in block.built))
        except Unsupported as error:
            refusal = str(error)
        for block in self.blocks:
            final |= block.gradients(None if refusal else session.grad_attr, session.loss_convention)
        self.reached = "done"
        built = [part for block in self.blocks for part in block.parts]
        claims = claims_of_all(built)
        return RankOutcome(
            rank=self.context.rank,
            status="ok",
            reached=self.reached,
            microbatches=tuple(
                Microbatch(
                    y=to_cpu(y) if self.after is None else None,
                    y_shape=tuple(y.shape),
                    y_dtype=y.dtype,
                    dx_TD=Grad(to_cpu(x.grad) if self.before is None else None),
                    dweights_TK=Grad(None),
                )
                for x, y in ends.values()
            ),
            grads_final=final,
            finish_refusal=refusal,
            resolved=shown_of(built, claims),
            claims=claims,
            loss_convention=session.loss_convention,
        )


class Block:
    """One block of the model: a dense part of the suite, and the backend's MoE."""

    def __init__(self, model: ProxyModel, session: Session, number: int) -> None:
        """Build both parts and write their parameters."""
        self.model, self.number, config = model, number, model.config
        prefix = f"block{number}/"
        values = {
            (name.removeprefix(prefix), expert): value
            for (name, expert), value in model.workload.parameters.items()
            if name.startswith(prefix)
        }
        self.parts: list[Any]
        self.moe: Callable[[Tensor], Tensor]
        if config.shared.ffn:
            self.moe = build(session, "layer", config)
            self.parts = [self.moe]
        else:
            router, exchange, experts = session.router(config), session.exchange(config), session.experts(config)
            self.parts = [router, exchange, experts]
            self.moe = lambda x: whole(exchange)(x, router(x).routing, experts)
        self.built: list[Parametrised] = [part for part in self.parts if hasattr(part, "named")]
        for surface in self.built:
            parameters.write(surface, values)
            without_noise(surface)
        ranks = model.topology.ranks("tp")
        self.shards = {name: (dim, ranks.index(model.context.rank), len(ranks)) for name, dim in _MIX}
        self.mix = {
            name: parameters.shard_of(values[name, None], shard)
            .to(model.context.device, copy=True)
            .contiguous()
            .requires_grad_()
            for name, shard in self.shards.items()
        }

    def __call__(self, h: Tensor, m: int) -> Tensor:
        """Return the output of the block for this rank's part of a sequence."""
        h = h + self._mixed(h, m)
        y: Tensor = h + self.moe(h)
        return y

    def _mixed(self, h: Tensor, m: int) -> Tensor:
        """Return the causal mean over the whole sequence, mapped by two linear maps that are sharded over tp."""
        topology = self.model.topology
        tp, cp = topology.group("tp"), topology.group("cp")
        place = _Place(self.model.workload, topology, m)
        chunk = _Gather.apply(h, place.in_tp, place.of_tp, tp)  # type: ignore[no-untyped-call]
        sequence = _Gather.apply(chunk, place.in_cp, place.of_cp, cp)  # type: ignore[no-untyped-call]
        counts = torch.arange(1, place.of_cp + 1, dtype=h.dtype, device=h.device)[:, None]
        mean = (sequence.cumsum(0) / counts)[place.in_cp : place.in_cp + place.of_tp]
        part = torch.tanh(mean @ self.mix["mix_in"].T) @ self.mix["mix_out"].T
        mine: Tensor = _ReduceScatter.apply(part, place.in_tp, len(h), tp)  # type: ignore[no-untyped-call]
        return mine

    def gradients(self, attribute: str | None, convention: str) -> dict[ParameterKey, Grad]:
        """Return all finished gradients; those of the backend only if it offers to finish them."""
        found: dict[ParameterKey, Grad] = {}
        prefix, topology = f"block{self.number}/", self.model.topology
        for name, parameter in self.mix.items():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=topology.group("dp_cp"))
            found[prefix + name, None] = Grad(to_cpu(parameter.grad), self.shards[name])
        if attribute is not None:
            for (name, expert), grad in parameters.gradients(self.built, attribute).items():
                found[prefix + name, expert] = grad
        return found


class _Place:
    """The offsets of this rank's tokens in the chunk of its tp group, and of the chunk in the sequence."""

    def __init__(self, workload: Workload, topology: Topology, m: int) -> None:
        """Compute offsets from the numbers of tokens of the ranks before."""
        sizes = workload.tokens[m]
        groups = workload.layout.groups()
        tp_of = {rank: ranks for ranks in groups["tp"] for rank in ranks}
        tp, cp = topology.ranks("tp"), topology.ranks("cp")
        chunks = [sum(sizes[rank] for rank in tp_of[member]) for member in cp]
        self.in_tp = sum(sizes[rank] for rank in tp[: tp.index(topology.rank)])
        self.of_tp = sum(sizes[rank] for rank in tp)
        self.in_cp = sum(chunks[: cp.index(topology.rank)])
        self.of_cp = sum(chunks)


SCENARIOS = {"proxy model": ProxyModel}
