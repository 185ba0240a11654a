"""What a training step is made of that needs none of its state."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.contract import Capacity, Claims, Config, Session


def go_back(output: Tensor, upstream: Tensor, *, create_graph: bool) -> None:
    """Send a gradient backward, fitted to an output that may have another form or number of elements than it must."""
    if upstream.numel() != output.numel():  # y is wrong; its backward is collective all the same
        upstream = F.pad(upstream.flatten(), (0, output.numel() - upstream.numel()))
    upstream = upstream.to(output.dtype).reshape(output.shape)
    with warnings.catch_warnings():  # of cycles between parameters and their gradients, which are cut at once
        if create_graph:
            warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        torch.autograd.backward(output, upstream, create_graph=create_graph)


def without_capacity(config: Config) -> Config:
    """Return the configuration of a router that drops nothing."""
    return replace(config, capacity=Capacity())


def weights_at(session: Session, claims: Claims, applied: str) -> str:
    """Return where routing weights are applied: where the backend says, or where it was asked to."""
    return {"native": claims.weights_at or session.weights_at, "input": "input", "output": "combine"}[applied]
