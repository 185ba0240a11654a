"""Functions of a training step that need none of its state."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.contract import Capacity, Claims, Config, Session


def go_back(output: Tensor, upstream: Tensor, *, create_graph: bool) -> None:
    """Run the backward of an output; the gradient is padded and reshaped if the output has a wrong shape."""
    if upstream.numel() != output.numel():  # y is wrong; its backward has collectives all the same
        upstream = F.pad(upstream.flatten(), (0, output.numel() - upstream.numel()))
    upstream = upstream.to(output.dtype).reshape(output.shape)
    with warnings.catch_warnings():  # about cycles of parameters and gradients, which are cut at once
        if create_graph:
            warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        torch.autograd.backward(output, upstream, create_graph=create_graph)


def without_capacity(config: Config) -> Config:
    """Return a copy of the config without a capacity."""
    return replace(config, capacity=Capacity())


def weights_at(session: Session, claims: Claims, applied: str) -> str:
    """Return where routing weights are applied: as the config says, or as the backend claims."""
    return {"native": claims.weights_at or session.weights_at, "input": "input", "output": "combine"}[applied]
