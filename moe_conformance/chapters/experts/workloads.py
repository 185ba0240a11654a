"""The pinned workloads of experts with biases, with activations other than SwiGLU, and of a new model.

For activations, rows, gate, up and inner biases are whole numbers, except for a first column of 1/2 that meets odd
numbers. So the outputs of gate and up are exact in every dtype, lie on both sides of every limit, and are at least 1/2
away from it and from 0, where derivatives jump.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, EP2_ETP2, SINGLE, Chapter
from moe_conformance.workloads.recipes import ONE_WITHOUT, Recipe, exchange_workload
from moe_conformance.workloads.records import draw
from moe_conformance.workloads.records.routes import empty_expert
from moe_conformance.workloads.records.runs import ExpertsStep, Script
from moe_conformance.workloads.records.workload import Batch, Call, Drawn, ParameterKey, Workload
from moe_conformance.workloads.selection.profiles import USUAL_RANKS, Profile

BIASES, ACTIVATION = ExpertsStep(option="biases"), ExpertsStep(option="activation")
NEW = Script("initial_experts")

_ALL = {"expert_biases": "all"}
_OUTPUT = {"expert_biases": "output"}
_GPT_OSS = {"activation.limit": 7.0, "activation.slope": 1.702, "activation.offset": 1.0}


def _function(name: str, *, gated: bool = True) -> dict[str, Any]:
    return {"activation.function": name, "activation.gated": gated}


OF_BIASES = (
    Recipe("own-biased-even", empty_expert, config={**_ALL, "top_k": 3}),
    Recipe("own-biased-rank-without-tokens", tokens=ONE_WITHOUT, config=_OUTPUT, schedule="F0 F1 B0 B1"),
    Recipe("own-biased-input-weights-even", config={**_OUTPUT, "weights_applied": "input"}),
    Recipe("own-biased-output-weights-even", config={**_ALL, "weights_applied": "output"}, profile="full"),
    Recipe("own-biased-padded-even", empty_expert, config={**_ALL, "capacity.padded": True}),
    Recipe("own-biased-gpt-oss-even", config={**_ALL, **_GPT_OSS}),
    Recipe("own-biased-ungated-gelu-even", config={**_ALL, **_function("gelu", gated=False)}),
)
OF_ACTIVATIONS = (
    Recipe("own-geglu-even", config=_function("gelu")),
    Recipe("own-geglu-tanh-even", config=_function("gelu_tanh")),
    Recipe("own-reglu-even", config=_function("relu")),
    Recipe("own-ungated-squared-relu-even", config=_function("squared_relu", gated=False)),
    Recipe("own-ungated-gelu-even", config=_function("gelu", gated=False)),
    Recipe("own-ungated-silu-even", config=_function("silu", gated=False)),
    Recipe("own-clamped-even", config={"activation.limit": 3.0}),
    Recipe("own-clamped-gpt-oss-even", config={**_ALL, **_GPT_OSS}),
)
OF_A_NEW_MODEL: Mapping[str, dict[str, Any]] = {
    "initial-experts": {},
    "initial-experts-biased-bfloat16": {**_ALL, "dtype": torch.bfloat16},
}


def biased(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of experts with biases, for a variant on a layout."""
    for recipe in OF_BIASES:
        if profile == "full" or recipe.profile == "quick":
            yield exchange_workload(recipe, BIASES, variant, layout)


def activated(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield the workloads of experts with other activations, for a variant on a layout."""
    del profile
    for recipe in OF_ACTIVATIONS:
        yield with_whole_numbers(exchange_workload(recipe, ACTIVATION, variant, layout))


def with_whole_numbers(workload: Workload) -> Workload:
    """Return the workload with rows and parameters of whole numbers, as the docstring of this file says."""
    generator = draw.generator(workload.name, workload.layout.name, "whole numbers")
    parameters = {key: _whole(key[0], value, generator) for key, value in workload.parameters.items()}
    batches = workload.batches

    def batch(microbatch: int, rank: int) -> Batch:
        drawn = batches[microbatch][rank]
        whole_generator = draw.generator(workload.name, workload.layout.name, microbatch, rank, "whole numbers")
        x_TD = torch.randint(-2, 3, drawn.x_TD.shape, generator=whole_generator).to(drawn.x_TD.dtype)
        x_TD[:, 0] = 0.5
        return replace(drawn, x_TD=x_TD)

    written: Mapping[ParameterKey, Tensor] = parameters
    return replace(workload, batches=Drawn(workload.tokens, batch), parameters=written)


def _whole(name: str, value: Tensor, generator: torch.Generator) -> Tensor:
    if name in ("down", "bias"):
        return value
    if name.startswith("bias_"):
        return torch.randint(-2, 3, value.shape, generator=generator).to(value.dtype)
    whole = torch.randint(-1, 2, value.shape, generator=generator)
    whole[:, 0] = 2 * torch.randint(0, 2, (len(whole),), generator=generator) - 1
    return whole.to(value.dtype)


def new(variant: str, layout: Layout, profile: Profile) -> Iterator[Workload]:
    """Yield experts of a new model, those with biases in the quick profile where they have replicas."""
    if layout.world > USUAL_RANKS:
        return
    for name, options in OF_A_NEW_MODEL.items():
        if profile == "full" or layout == EP2_EDP2 or not options:
            calls = (Call("read", ({},) * layout.world),)
            config = Config(variant).changed(options)
            yield Workload(name, NEW, config, layout, (), memory="filled", calls=calls)


CHAPTERS = (
    Chapter((BIASES,), tuple(each.name for each in OF_BIASES), biased, "every", (SINGLE, EP2, EP2_ETP2, EP2_EDP2)),
    Chapter((ACTIVATION,), tuple(each.name for each in OF_ACTIVATIONS), activated, quick=(SINGLE, EP2, EP2_ETP2)),
    Chapter((NEW,), tuple(OF_A_NEW_MODEL), new, quick=(EP2, EP2_ETP2, EP2_EDP2)),
)
