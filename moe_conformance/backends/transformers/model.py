"""A model of one module, for operations of the library on whole models: its plans find only this module.

So the factors by which gradients are divided, and the meshes that parameters are sharded over, are the library's own.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any, Literal

from torch import nn

from moe_conformance.backends.transformers.placement import Placement


class _Around(nn.Module):
    """A module that calls the one module in it."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, inner)

    def forward(self, *given: Any) -> Any:
        return getattr(self, self._name)(*given)


def model_with(module: nn.Module, path: str, config: Any) -> Any:
    """Return a model in which the module stands under a path, such as "layers.0.mlp"; calling it calls the module."""
    model = module
    for name in reversed(path.split(".")):
        model = _Around(name, model)
    model.config = config
    return model


def plan_of(model: Any, kind: Literal["ep", "fsdp"]) -> dict[str, str]:
    """Return the rules of the config's own plan that name a module or a parameter of the model, by their full names."""
    plan = getattr(model.config, f"base_model_{kind}_plan")
    there = [name for name, _ in chain(model.named_modules(), model.named_parameters())]
    rules = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    return {name: style for rule, style in rules.items() for name in there if rule.fullmatch(name)}


def shard(model: Any, placement: Placement) -> None:
    """Shard the model by FSDP2 where the library does: where ranks have several batches. Collective."""
    if placement.batches == 1:
        return
    from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism
    from transformers.distributed.utils import TransformersDeviceMesh

    model.config.distributed_config = placement.distributed_config
    meshes = TransformersDeviceMesh(placement.dense_mesh, placement.expert_mesh)
    apply_fully_sharded_data_parallelism(model, meshes, plan_of(model, "fsdp"), plan_of(model, "ep"))


def reduction_of(model: Any) -> str:
    """Return what reduces the model's gradients, in terms of the library."""
    managed = getattr(model, "_is_fsdp_managed_module", False)
    return "apply_fully_sharded_data_parallelism" if managed else "none"
