"""MC-98: with the all-gather dispatcher the factor under balance is the size of the exchange group.

Two ranks of ep, of four tokens each, evenly routed. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.transformer_config import TransformerConfig

try:
    from megatron.core.transformer.moe.moe_logging import get_moe_overload_factor_tracker
except ImportError:  # the branch dev has it
    print("not there: this Megatron-Core has no tracker of overload factors")
    sys.exit(77)


class Writer:
    """Keeps what a TensorBoard writer is given."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Keep a value, rounded."""
        self.values[name.removeprefix("moe/")] = round(value, 3)


def run(rank: int, store: str, found: torch.Tensor) -> None:
    """Run a forward, and keep the largest factor of each dispatcher."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.ReduceOp.AVG = dist.ReduceOp.MAX  # over groups of one rank, and gloo has no average
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=4, ffn_hidden_size=4, moe_ffn_hidden_size=4,
        num_moe_experts=4, moe_router_topk=1, moe_token_dispatcher_type="allgather", add_bias_linear=False,
        expert_model_parallel_size=2, perform_initialization=False, log_moe_overload_factor=True,
        moe_router_pre_softmax=True,
    )  # fmt: skip
    layer = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)(config=config, layer_number=1)
    layer.route = lambda *_: (torch.eye(4), torch.eye(4).bool())  # token t to expert t
    layer(torch.ones(4, 1, 4))
    writer = Writer()
    get_moe_overload_factor_tracker().report(iteration=1, writer=writer)
    found[rank] = writer.values["max_overload_factor"]
    dist.barrier()


if __name__ == "__main__":
    found = torch.zeros(2).share_memory_()
    mp.start_processes(run, (tempfile.mktemp(), found), nprocs=2, start_method="fork")
    print(f"observed: with the all-gather dispatcher and ep = 2 the factor under balance is {found.max():.2f}")
    print("expected: with the all-gather dispatcher and ep = 2 the factor under balance is 1.00")
    sys.exit(int(found.max() > 1.01))
