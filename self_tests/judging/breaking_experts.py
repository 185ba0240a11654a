"""Ways to break a simulated layer with real experts, or the outcome that it brought back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.contract.topology import Layout
from moe_conformance.scenarios.outcome import Grad, Outcome, RankOutcome
from moe_conformance.workloads.records.workload import Batch, ParameterKey, Workload
from self_tests.judging.simulated_experts import own_workload, simulate_experts

REPLICATED = Layout(4, ep=2)  # ranks 0 and 2 hold experts 0 to 3, ranks 1 and 3 the others

Finals = dict[ParameterKey, Grad]


def clean(layout: Layout | None = None, **fields: object) -> Outcome:
    """Run without a fault."""
    return simulate_experts(own_workload(layout, **fields))  # type: ignore[arg-type]


def edit_final(outcome: Outcome, change: Callable[[int, ParameterKey, Tensor], Tensor | None]) -> Outcome:
    """Change finished gradients, given (rank, key, gradient)."""

    def changed(rank: RankOutcome) -> RankOutcome:
        assert rank.grads_final is not None
        final = {}
        for key, grad in rank.grads_final.items():
            assert grad.value is not None
            final[key] = replace(grad, value=change(rank.rank, key, grad.value))
        return replace(rank, grads_final=final)

    return replace(outcome, ranks=tuple(map(changed, outcome.ranks)))


def with_parameters(outcome: Outcome, role: Callable[[ParameterKey], ParameterKey]) -> Outcome:
    """Pretend that the run was given other parameters than it was: judge it against another workload."""
    own = outcome.workload.parameters
    return replace(outcome, workload=replace(outcome.workload, parameters={key: own[role(key)] for key in own}))


def edit_batches(workload: Workload, change: Callable[[Batch], Batch]) -> Workload:
    """Change every batch."""
    return replace(workload, batches=tuple(tuple(map(change, ranks)) for ranks in workload.batches))


def never(expert: int) -> Callable[[Batch], Batch]:
    """Empty all slots of one expert."""
    return lambda batch: replace(batch, ids_TK=torch.where(batch.ids_TK == expert, -1, batch.ids_TK))


def without(outcome: Outcome, key: ParameterKey, ranks: tuple[int, ...]) -> Outcome:
    """Leave a parameter unnamed on some ranks."""

    def left(grads: Finals) -> Finals:
        return {name: grad for name, grad in grads.items() if name != key}

    return replace(
        outcome,
        ranks=tuple(
            replace(rank, grads_local=left(dict(rank.grads_local)), grads_final=left(dict(rank.grads_final or {})))
            if rank.rank in ranks
            else rank
            for rank in outcome.ranks
        ),
    )


def swap_gate_and_up(key: ParameterKey) -> ParameterKey:
    """Exchange the roles of gate and up."""
    return {"gate": "up", "up": "gate", "down": "down"}[key[0]], key[1]


def previous(key: ParameterKey) -> ParameterKey:
    """Give every expert the role of the one before."""
    assert key[1] is not None
    return key[0], (key[1] - 1) % 8


def cut(key: ParameterKey, value: Tensor) -> Tensor:
    """Set the second half of the hidden units to zero."""
    left = value.clone()
    (left[:, 8:] if key[0] == "down" else left[8:]).zero_()
    return left


def add(value: Tensor | None, change: Tensor) -> Tensor:
    """Add to a tensor that is there."""
    return present(value) + change


def present(value: Tensor | None) -> Tensor:
    """Refuse an absent tensor."""
    assert value is not None
    return value
