"""Write a drawn workload as JSON, bit for bit, so that a failing batch can be read and shared.

Numbers are written in the shortest form that reads back to the same bits. `reading_example` reads the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from moe_conformance.contract import Unsupported
from moe_conformance.workloads.records.runs import ExchangeStep, RouterStep, Run
from moe_conformance.workloads.records.workload import Batch, Workload

FORMAT = 2
KINDS: Mapping[Run, str] = {ExchangeStep(): "probe", RouterStep(): "route"}  # drawn runs, and their names in files

# The options that are drawn; all others of a drawn workload have their defaults.
ASKED = (
    "variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied", "routing.score", "routing.normalise",
    "routing.scale", "routing.groups", "routing.group_score", "routing.balance_bias",
)  # fmt: skip

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
}


def to_json(workload: Workload) -> dict[str, Any]:
    """Return a workload as dicts, lists, strings and numbers.

    Raises:
        ValueError: an option outside of `ASKED` differs from its default.
    """
    config, layout = workload.config, workload.layout
    try:
        config.only(*ASKED)
    except Unsupported as error:
        raise ValueError("only what is drawn can be written down") from error
    options = config.options()
    drawn = {name: options[name] for name in ASKED}
    drawn |= {"dtype": _name(config.dtype), "routing.groups": config.routing.groups and list(config.routing.groups)}
    return {
        "format": FORMAT,
        "kind": KINDS[workload.run],
        "layout": {field.name: getattr(layout, field.name) for field in fields(layout)},
        "config": drawn,
        "schedule": workload.schedule,
        "lead": workload.lead,
        "asynchrony": workload.asynchrony,
        "parameters": {name: _tensor(value) for (name, _), value in workload.parameters.items()},
        "batches": [[_batch(batch) for batch in ranks] for ranks in workload.batches],
    }


def describe(workload: Workload) -> list[str]:
    """Return a few lines that describe the options and inputs of a workload."""
    config = workload.config
    words = [f"E = {config.experts}", f"K = {config.top_k}", f"D = {config.hidden}", _name(config.dtype)]
    if workload.run == RouterStep():
        words += [config.routing.score, *(["normalised"] if config.routing.normalise else [])]
        words += [f"scale {config.routing.scale}"] if config.routing.scale != 1 else []
        words += ["balancing bias"] if config.routing.balance_bias else []
        if config.routing.groups:
            words.append(
                f"{config.routing.groups[1]} of {config.routing.groups[0]} groups by {config.routing.group_score}"
            )
    lines = [f"drawn: {', '.join(words)}, schedule {workload.schedule}"]
    for m, ranks in enumerate(workload.batches):
        for rank, batch in enumerate(ranks):
            fed = f"{len(batch.x_TD)} tokens" if workload.run == RouterStep() else f"ids {batch.ids_TK.tolist()}"
            lines.append(f"  microbatch {m}, rank {rank}: {fed}")
    return lines


def _batch(batch: Batch) -> dict[str, Any]:
    return {field.name.partition("_")[0]: _tensor(getattr(batch, field.name)) for field in fields(batch)}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": _name(tensor.dtype), "shape": list(tensor.shape), "values": tensor.flatten().tolist()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
