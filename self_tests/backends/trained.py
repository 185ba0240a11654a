"""What a trainer's steps must yield, by the oracle alone: the tests of adapters do not lean on the judge."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from moe_conformance.chapters.training.workloads import script
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.reference.training.model import Tokens
from moe_conformance.reference.training.optimisers import SGD, AdamW
from moe_conformance.reference.training.steps import Step, train
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.scenarios.parameters import shard_of
from self_tests.backends.asking import finished


def trained(engine: Engine, backend: str, variant: str, layout: Layout, name: str) -> Outcome:
    """Run a script of training, which every rank must finish."""
    return finished(engine, backend, script(name, layout).through(variant))


def steps_of(outcome: Outcome) -> list[Step]:
    """The oracle's steps on the tokens of all ranks and microbatches."""
    workload = outcome.workload
    options = workload.config.training
    optimiser: AdamW | SGD = AdamW(options.rate, options.betas, options.epsilon, options.decay)
    if options.optimiser == "sgd":
        optimiser = SGD(options.rate, options.momentum, options.decay)
    every = []
    for call in workload.calls:
        batches = [batch for given in call.given for batch in given["batches"]]
        every.append(Tokens(*(torch.cat([getattr(batch, each) for batch in batches]) for each in Tokens._fields)))
    largest = inf if options.largest_norm is None else options.largest_norm
    return train(workload.parameters, every, optimiser, top_k=workload.config.top_k, largest_norm=largest)


def assert_trained_alike(outcome: Outcome, *, allowed: float) -> None:
    """Loss, norm (if there is one), parameters and moments are those of one device, each within so much of its norm."""
    for number, step in enumerate(steps_of(outcome)):
        for rank in outcome.ranks:
            seen = rank.answers[number].values
            assert _near(seen["loss"], step.loss, allowed), (number, seen["loss"], step.loss)
            assert seen["norm"] is None or _near(seen["norm"], step.norm, allowed), (number, seen["norm"], step.norm)
            for key, shard in seen["shards"].items():
                for name, whole in step.after.kept[key].items():
                    assert _near(seen["kept"][name][key], shard_of(whole, shard), allowed), (number, name, key)
                    theta = shard_of(step.after.parameters[key], shard)
                    assert _near(seen["parameters"][key], theta, allowed), (number, key)


def _near(seen: Tensor, expected: Tensor, allowed: float) -> bool:
    return float((seen.double() - expected).norm()) <= allowed * float(expected.norm()) + 1e-12
