"""Gradients as hooks of parameters see them, beside those that lie in `grad` after the backwards."""

from __future__ import annotations

import torch

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import NotOffered, Tally, WrongGradient


def judge_hooked(reading: Reading, tally: Tally) -> None:
    """Decide whether what autograd passed to the hooks of a parameter adds up to its gradient, to the bit.

    Before gradients are finished, on every rank: what shards or reduces gradients while they are made hangs on hooks.

    Raises:
        NotOffered: the session has its gradients elsewhere than in `grad`.
        WrongGradient: the hook of a parameter that has a gradient was passed none, or another one.
    """
    findings = []
    for rank in reading.ranks:
        if rank.grads_hooked is None:
            raise NotOffered("the gradients of this backend do not lie in grad, where autograd puts them")
        for (name, expert), grad in rank.grads_local.items():
            seen = rank.grads_hooked[name, expert].value
            if grad.value is None or (seen is not None and torch.equal(seen, grad.value)):
                tally.add(elements=0 if grad.value is None else grad.value.numel(), rank=rank.rank)
                continue
            whose = name if expert is None else f"{name} of expert {expert}"
            if seen is None:
                told = (
                    f"rank {rank.rank}: the hook of {whose} was passed no gradient; expected its own in every backward"
                )
                told += "; likely cause: the backward writes to grad itself"
            else:
                at = int((seen.double() - grad.value.double()).abs().argmax())
                values = f"{float(seen.flatten()[at]):.6g}; expected {float(grad.value.flatten()[at]):.6g}"
                told = f"rank {rank.rank}: the hook of {whose} was passed {values}, as after the backwards"
            findings.append(Finding("hook", told, (rank.rank,)))
    if findings:
        fail(WrongGradient, "gradient", findings)
