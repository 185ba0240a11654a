"""MC-99: padding tokens that are not routed count in the balanced share of the overload factor.

One rank, four tokens, of which two are padding without experts. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
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


torch.cuda.current_device = lambda: torch.device("cpu")
dist.ReduceOp.AVG = dist.ReduceOp.MAX  # over groups of one rank, and gloo has no average
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, num_attention_heads=1, hidden_size=4, ffn_hidden_size=4, moe_ffn_hidden_size=4, num_moe_experts=4,
    moe_router_topk=1, moe_router_pre_softmax=True, moe_token_dispatcher_type="allgather", add_bias_linear=False,
    perform_initialization=False, log_moe_overload_factor=True,
)  # fmt: skip
layer = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)(config=config, layer_number=1)
map_TE = torch.eye(4).bool()
map_TE[2:] = False  # as the router makes it of a padding mask for HybridEP
layer.route = lambda *_: (map_TE.float(), map_TE)
layer(torch.ones(4, 1, 4), padding_mask=torch.tensor([[False, False, True, True]]))
writer = Writer()
get_moe_overload_factor_tracker().report(iteration=1, writer=writer)
factor = writer.values["max_overload_factor"]
print(f"observed: on the only rank the factor is {factor:.2f}")
print("expected: on the only rank the factor is 1.00")
sys.exit(int(factor != 1.0))
