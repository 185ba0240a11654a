"""MC-80: without Transformer Engine a test of its version raises TypeError.

Exits 1 while the finding is there.
Needs: megatron-core<0.17
"""

from __future__ import annotations

import sys

from megatron.core.transformer.transformer_config import TransformerConfig

try:
    TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=32, bf16=True, add_bias_linear=False,
        num_moe_experts=8, moe_ffn_hidden_size=16, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=2,
        overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True,
        cuda_graph_impl="transformer_engine", cuda_graph_scope=["moe_router"],
    )  # fmt: skip
    observed = "accepted"
except Exception as error:
    observed = f"{type(error).__name__}: {error}"
print(f"observed: delay_wgrad_compute with cuda_graph_impl='transformer_engine': {observed}")
print("expected: an error that says that Transformer Engine is needed")
sys.exit(int(observed.startswith("TypeError")))
