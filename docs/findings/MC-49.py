"""MC-49: ranks that replicate experts draw equal forced logits for different tokens.

Two data parallel ranks with tp = ep = 1: both hold all experts. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.moe_utils import apply_random_logits


def run(rank: int, store: str, drawn: torch.Tensor) -> None:
    """Write the logits that are drawn for the rank's tokens; the CPU's generator stands in for the GPU's."""
    torch.cuda.get_rng_state, torch.cuda.manual_seed = torch.get_rng_state, torch.default_generator.manual_seed
    random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, **_: torch.set_rng_state(state)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()
    random.model_parallel_cuda_manual_seed(1234)
    drawn[rank] = apply_random_logits(torch.zeros(4, 8))
    dist.barrier()


if __name__ == "__main__":
    drawn = torch.zeros(2, 4, 8).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), drawn), nprocs=2, start_method="fork")
    equal = torch.equal(drawn[0], drawn[1])
    print("observed: the random logits of two data parallel ranks", "are equal" if equal else "differ")
    print("expected: the random logits of two data parallel ranks differ")
    sys.exit(int(equal))
