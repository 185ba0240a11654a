"""MC-86: the collectives in backwards of sequence parallel regions are not recorded: second derivatives are cut.

Two ranks gather rows, and reduce-scatter rows, and differentiate a product with the gradient by the upstream gradient.
Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


def gathered(rows: torch.Tensor) -> torch.Tensor:
    """Gather rows as the dispatcher gathers tokens over etp."""
    return gather_from_sequence_parallel_region(rows, group=dist.group.WORLD, output_split_sizes=[4, 4])


def scattered(rows: torch.Tensor) -> torch.Tensor:
    """Reduce-scatter rows as the dispatcher adds up what comes back."""
    return reduce_scatter_to_sequence_parallel_region(rows, group=dist.group.WORLD, input_split_sizes=[2, 2])


def right(region: Callable[[torch.Tensor], torch.Tensor], rank: int) -> bool:
    """Return whether s = <dL/dx, v> has the derivative by the upstream gradient: what the region makes of v."""
    x = torch.ones(4, 2, requires_grad=True)
    y = region(x)
    upstream = torch.arange(1.0, 1 + y.numel()).reshape(y.shape).requires_grad_()
    (gradient,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    v = torch.full_like(x, 1.0 + rank)
    expected = region(v)
    if not gradient.requires_grad:
        return False
    (found,) = torch.autograd.grad((gradient * v).sum(), upstream, allow_unused=True)
    return found is not None and torch.equal(found, expected)


def run(rank: int, store: str, found: torch.Tensor) -> None:
    """Write into the rank's row for which regions the derivative is right."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()
    for at, region in enumerate((gathered, scattered)):
        found[rank, at] = right(region, rank)
    dist.barrier()


if __name__ == "__main__":
    found = torch.zeros(2, 2, dtype=torch.bool).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), found), nprocs=2, start_method="fork")
    says = (
        "the derivative of <dL/dx, v> by the upstream gradient is right on {} ranks of 2 behind a gather, on {} behind"
    )
    print(f"observed: {says.format(*found.sum(0).tolist())} a reduce-scatter, and there is no error")
    print(f"expected: {says.format(2, 2)} a reduce-scatter, or an error")
    sys.exit(int(not found.all()))
