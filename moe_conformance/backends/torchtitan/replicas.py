"""FSDP2 over ranks that replicate a module, as torchtitan applies it under pipeline schedules.

Parameters are kept in float32 and cast for every use. Microbatches accumulate without reduction until `reduce`; a
rank's own gradient can be read before it in float32 alone. Gradients are summed, not divided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard

from moe_conformance.contract import Topology


def shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, dim: int = 0) -> None:
    """Shard every parameter over the ranks of a mesh along a dimension; collective."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

    fully_shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        reshard_after_forward=False,  # as the library has it under pipeline schedules
        shard_placement_fn=lambda _: Shard(dim),
    )
    disable_fsdp_gradient_division(module)
    sharded: Any = module
    if mesh.device_type == "cpu":  # gloo has no premultiplied sum, which FSDP2 takes even for a factor of one
        sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_requires_gradient_sync(False)
    sharded.set_reshard_after_backward(False)
    sharded.set_is_last_backward(False)


def reduce(module: nn.Module, topology: Topology, device: torch.device) -> None:
    """Reduce gradients as the pipeline schedules do after the last backward; collective."""
    from torch.distributed.pipelining import PipelineStage

    pp = topology.ranks("pp")
    stage: Any = PipelineStage(module, pp.index(topology.rank), len(pp), device, group=topology.group("pp"))
    stage.perform_reduce_grad(1)
