"""MC-130: under combined 1F1B the padding mask does not reach the router.

One MoE layer of four tokens, of which the last two are padding. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext, suppress

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


class Stream:
    """A stream and an event: nothing waits on a CPU."""

    def wait(self, stream: object = None) -> None:
        """Do nothing."""

    wait_stream = record = synchronize = wait

    def record_event(self) -> Stream:
        """Return itself."""
        return self


class Attention(IdentityOp):
    """Returns its input; has no weights."""

    def backward_dw(self) -> None:
        """Do nothing."""


torch.compiler.set_stance("force_eager")
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = Stream
torch.cuda.stream = torch.cuda.nvtx.range = nullcontext
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
torch.Tensor.record_stream = lambda *_: None
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # MC-04
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=2, moe_router_topk=1, moe_ffn_hidden_size=4,
    moe_router_pre_softmax=True, moe_token_dispatcher_type="alltoall", add_bias_linear=False, hidden_dropout=0.0,
    bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=True,
)  # fmt: skip
mlp = get_moe_module_spec(use_te=False, num_experts=2, moe_grouped_gemm=False)
parts = TransformerLayerSubmodules(self_attention=Attention, mlp=mlp, mlp_bda=get_bias_dropout_add)
layer = ModuleSpec(TransformerLayer, submodules=parts)
model = GPTModel(config, layer, 8, 4, pre_process=False, post_process=False, position_embedding_type="none")
moe, seen = model.decoder.layers[0].mlp, []
route = moe.router.forward


def spy(x: torch.Tensor, padding_mask: torch.Tensor | None = None, *more: object) -> object:
    """Remember what mask the router is given."""
    seen.append(padding_mask)
    return route(x, padding_mask, *more)


moe.router.forward = spy
x, mask = torch.randn(4, 1, 4, dtype=torch.bfloat16), torch.tensor([[False, False, True, True]])
ids = torch.zeros(1, 4, dtype=torch.long)
model.set_input_tensor(x)
model(ids, ids, None, padding_mask=mask)
model.set_input_tensor(x)
plan = model.build_schedule_plan(ids, ids, None, padding_mask=mask)
with suppress(
    RuntimeError
):  # with ep = 1 the schedule gives back memory that it still needs; the router has run by then
    type(plan).run(plan, None)
forward, schedule = (None if each is None else each.flatten().tolist() for each in seen)
print(f"observed: the router is given the mask {forward} by a forward, and {schedule} by the schedule of combined 1F1B")
print(f"expected: {forward} by both")
sys.exit(int(schedule != forward))
