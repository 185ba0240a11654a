"""The workload with stored results: a backend is compared with values that no change of an oracle moves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout
from moe_conformance.goldens import stored_values
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Batch, ParameterKey, Workload

NAME = "own-golden-even"
CHAPTER = "experts"
_PARAMETERS = ("gate", "up", "down")


def golden_workload(variant: str, layout: Layout) -> Workload | None:
    """Return the stored layer as a workload, its tokens split over the ranks; None if they cannot be split evenly.

    Raises:
        GoldenError: the golden is missing, or differs from its digest.
    """
    stored = _stored(stored_values.folder())
    inputs = {name.removeprefix("layer/in/"): value for name, value in stored.items() if "/in/" in name}
    (T, K), (E, F, D) = inputs["ids_TK"].shape, inputs["gate"].shape
    if T % layout.world or E % layout.ep or layout.pp > 1:  # every pipeline stage would have only a part of the tokens
        return None
    config = Config(variant=variant, experts=E, top_k=K, hidden=D, ffn=F)
    batches = tuple(_batch(inputs, T // layout.world, rank) for rank in range(layout.world))
    parameters: dict[ParameterKey, Tensor] = {
        (name, expert): inputs[name][expert].float() for name in _PARAMETERS for expert in range(E)
    }
    return Workload(NAME, ExpertsStep(), config, layout, (batches,), parameters=parameters, golden=CHAPTER)


@cache
def _stored(folder: Path) -> dict[str, Tensor]:
    """Return the stored tensors by name; they are read and compared with their digest once."""
    return stored_values.read(folder, CHAPTER)


def _batch(inputs: Mapping[str, Tensor], tokens: int, rank: int) -> Batch:
    mine = slice(rank * tokens, (rank + 1) * tokens)
    x_TD, weights_TK, upstream_TD = (inputs[name][mine].to(torch.float32) for name in ("x_TD", "weights_TK", "dy_TD"))
    return Batch(x_TD, inputs["ids_TK"][mine], weights_TK, upstream_TD)
