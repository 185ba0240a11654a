"""MC-131: under combined 1F1B the final layer norm is left out where the last layer is dense.

A model of one dense layer: the last one of a model with moe_layer_freq = [1, 0]. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig


class Stream:
    """A stream and an event: nothing waits on a CPU."""

    def wait(self, stream: object = None) -> None:
        """Do nothing."""

    wait_stream = record = synchronize = wait


torch.compiler.set_stance("force_eager")
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = Stream
torch.cuda.stream = torch.cuda.nvtx.range = nullcontext
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # for a dropout of 0
torch.manual_seed(1)
config = TransformerConfig(
    num_layers=1, num_attention_heads=1, hidden_size=4, add_bias_linear=False, hidden_dropout=0.0,
    attention_dropout=0.0, use_cpu_initialization=True,
)  # fmt: skip
model = GPTModel(config, get_gpt_layer_local_spec(), 8, 4, position_embedding_type="none")
norm, calls = model.decoder.final_layernorm, []
norm.register_forward_hook(lambda *_: calls.append(1))
ids, mask = torch.arange(4)[None], torch.ones(1, 1, 4, 4).triu(1).bool()
right = model(ids, ids, mask)
norms = len(calls)
plan = model.build_schedule_plan(ids, ids, mask)
logits = type(plan).run(plan, None)
off, there = float((logits - right).abs().max()), len(calls) - norms
print(f"observed: final norms in a forward {norms}, in the schedule {there}; logits differ by up to {off:.3f}")
print(f"expected: final norms in a forward {norms}, in the schedule {norms}; logits differ by up to 0.000")
sys.exit(int(off > 0))
