"""A perfect layer with real experts on all ranks in one process, in any dtype: makes outcomes for the judges' tests.

Every rank has parameters of its own, the part of its experts that its etp shard holds. Nothing is shared with the
oracles or with the native backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.scenarios.outcome import Grad, Microbatch, Outcome, RankOutcome
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import ParameterKey, Workload

Shard = tuple[int, int, int] | None


@dataclass(frozen=True)
class Arithmetic:
    """How an honest implementation computes."""

    cast: bool = False  # routing weights are rounded to the tokens' dtype
    place: Literal["output", "hidden", "input"] = "output"  # where the weight multiplies
    fused: bool = True  # silu as one function, or as z * sigmoid(z)
    convention: Literal["sum", "mean_over_dp"] = "sum"


def own_workload(
    layout: Layout | None = None, tokens: int = 12, microbatches: int = 1, series: str = "own", **fields: Any
) -> Workload:
    """Draw a workload for real experts, on two ranks if nothing else is said; T differs between ranks."""
    layout, config = layout or Layout(2, ep=2), Config().changed(fields)
    batches = []
    for m in range(microbatches):
        ranks = []
        for rank in range(layout.world):
            seeded = draw.generator(series, layout.name, m, rank)
            ids_TK = draw.choose(max(tokens - rank - m, 0), config, seeded)
            ranks.append(draw.real_batch(ids_TK, config, seeded))
        batches.append(tuple(ranks))
    schedule = " ".join(f"F{m} B{m}" for m in range(microbatches))
    parameters = draw.expert_parameters(config, draw.generator(series, layout.name, "experts"))
    return Workload("simulated", ExpertsStep(), config, layout, tuple(batches), schedule, parameters)


def simulate_experts(workload: Workload, arithmetic: Arithmetic | None = None) -> Outcome:
    """Run the workload and return what ranks would bring back, gradients finished."""
    arithmetic, layout = arithmetic or Arithmetic(), workload.layout
    ranks = range(layout.world)
    held = [_parameters(workload, rank) for rank in ranks]
    microbatches = [
        [_step(workload, arithmetic, held, m, rank) for m in range(len(workload.batches))] for rank in ranks
    ]
    local = [
        {key: Grad(None if leaf.grad is None else leaf.grad.clone(), shard) for key, (leaf, shard) in mine.items()}
        for mine in held
    ]
    final = [_finished(workload, arithmetic, local, rank) for rank in ranks]
    return Outcome(
        "simulated",
        workload,
        tuple(
            RankOutcome(
                rank=rank,
                status="ok",
                microbatches=tuple(microbatches[rank]),
                local_experts=tuple(sorted({expert for _, expert in held[rank] if expert is not None})),
                grads_local=local[rank],
                grads_final=final[rank],
                weights_at="input" if arithmetic.place == "input" else "combine",
                partial=layout.etp > 1,
                loss_convention=arithmetic.convention,
            )
            for rank in ranks
        ),
        0.0,
    )


def stage_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the ranks of a rank's pipeline stage, which is the slowest axis."""
    size = layout.world // layout.pp
    return tuple(range(rank // size * size, (rank // size + 1) * size))


def _parameters(workload: Workload, rank: int) -> dict[ParameterKey, tuple[Tensor, Shard]]:
    """Return the leaves that a rank holds: etp counts fastest, then ep."""
    layout, held = workload.layout, workload.config.experts // workload.layout.ep
    place, index = rank // layout.etp % layout.ep, rank % layout.etp
    found: dict[ParameterKey, tuple[Tensor, Shard]] = {}
    for (name, expert), value in workload.parameters.items():
        if expert is not None and expert // held == place:
            dim = 1 if name == "down" else 0
            part = value.chunk(layout.etp, dim)[index].clone().requires_grad_()
            found[name, expert] = (part, (dim, index, layout.etp) if layout.etp > 1 else None)
    return found


def _step(
    workload: Workload, how: Arithmetic, held: list[dict[ParameterKey, tuple[Tensor, Shard]]], m: int, rank: int
) -> Microbatch:
    """Run one microbatch of one rank forward and backward, through the experts of its exchange group."""
    batch, config = workload.batches[m][rank], workload.config
    x, weights = batch.x_TD.clone().requires_grad_(), batch.weights_TK.clone().requires_grad_()
    y = x.new_zeros(x.shape) + x[:0].sum()  # 0 * x would be NaN where x is
    group = next(ranks for ranks in workload.layout.groups()["ep_etp"] if rank in ranks)
    for owner in group:
        for e in sorted({e for _, e in held[owner] if e is not None}):
            tokens, slots = (batch.ids_TK == e).nonzero(as_tuple=True)
            leaves = [held[owner][name, e][0] for name in ("gate", "up", "down")]
            w_R1 = weights[tokens, slots][:, None]
            answers = _expert(x[tokens], w_R1.to(config.dtype) if how.cast else w_R1, leaves, how)
            y = y.index_add(0, tokens, answers)
    y.backward(batch.upstream)
    return Microbatch(
        y=y.detach(),
        y_shape=tuple(y.shape),
        y_dtype=y.dtype,
        dx_TD=Grad(x.grad),
        dweights_TK=Grad(weights.grad),
    )


def _expert(rows_RD: Tensor, w_R1: Tensor, leaves: list[Tensor], how: Arithmetic) -> Tensor:
    gate_FD, up_FD, down_DF = leaves
    if how.place == "input":
        rows_RD = (w_R1 * rows_RD).to(rows_RD.dtype)
    gate_RF = F.linear(rows_RD, gate_FD)
    hidden_RF = (F.silu(gate_RF) if how.fused else gate_RF * gate_RF.sigmoid()) * F.linear(rows_RD, up_FD)
    if how.place == "hidden":
        hidden_RF = (w_R1 * hidden_RF).to(rows_RD.dtype)
    out_RD = F.linear(hidden_RF, down_DF)
    return (w_R1 * out_RD).to(rows_RD.dtype) if how.place == "output" else out_RD


def _finished(
    workload: Workload, how: Arithmetic, local: list[dict[ParameterKey, Grad]], rank: int
) -> Mapping[ParameterKey, Grad]:
    """Add up the gradients of a rank's replicas one by one, in the parameters' dtype."""
    found = {}
    for key, grad in local[rank].items():
        replicas = [local[other].get(key) for other in stage_of(workload.layout, rank)]
        parts = [each.value for each in replicas if each and each.value is not None and each.shard == grad.shard]
        summed = sum(parts[1:], parts[0])
        if how.convention == "mean_over_dp":
            summed = summed / (workload.layout.dp * workload.layout.cp)
        found[key] = Grad(summed, grad.shard)
    return found
