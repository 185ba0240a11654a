"""What Megatron-Core's DistributedOptimizer keeps of a parameter, of which each data parallel rank has a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STATE = {"exp_avg": "first", "exp_avg_sq": "second", "momentum_buffer": "momentum"}  # in torch's optimisers


def gathered(optimizers: Sequence[Any], parameter: Tensor) -> Mapping[str, Tensor]:
    """Return what is kept of a parameter, put together from the ranks of its data parallel group; collective.

    The optimizer whose buffers have the parameter maps it to the range of its elements on this rank, and that range to
    a parameter of its own, which has the state. A rank without any of its elements has no such entry.
    """
    (optimizer,) = (each for each in optimizers if _has(each, parameter))
    own, place = _own(optimizer, parameter)
    found: dict[str, Tensor] = {}
    for name in _names(optimizer):
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if own is not None:
            whole[place] = optimizer.optimizer.state[own][name].flatten()
        dist.all_reduce(whole, group=optimizer.data_parallel_group)
        found[STATE[name]] = whole.view_as(parameter)
    return found


def _has(optimizer: Any, parameter: Tensor) -> bool:
    return any(each is parameter for buffer in optimizer.buffers for each in buffer.params)


def _own(optimizer: Any, parameter: Tensor) -> tuple[Tensor | None, slice]:
    """Return the parameter of this rank's elements, and where they are; None if it has none of them."""
    if parameter not in optimizer.model_param_gbuf_map:
        return None, slice(0)
    buffer, dtype, bucket = optimizer.model_param_gbuf_map[parameter]
    elements = optimizer.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
    group, number = optimizer.model_param_group_index_map[parameter]
    return optimizer.optimizer.param_groups[group]["params"][number], slice(elements.start, elements.end)


def _names(optimizer: Any) -> list[str]:
    """Return the names of what is kept, the same on all ranks: of the first state that this rank has."""
    states = list(optimizer.optimizer.state.values())
    return [name for name in STATE if states and states[0].get(name) is not None]
