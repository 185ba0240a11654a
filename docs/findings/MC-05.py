"""MC-05: a dispatcher has one dispatch at a time: a second one before the first combine gives wrong outputs.

One rank; the experts are the identity. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


def dispatch(x: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Return the rows for the experts."""
    chosen = F.one_hot(torch.tensor(ids), 2).bool()
    hidden, probs = dispatcher.dispatch_preprocess(x, chosen, chosen.float())
    return dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(hidden, probs))[0]


def combine(rows: torch.Tensor) -> torch.Tensor:
    """Return the output of the tokens."""
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))


torch.cuda.current_device = lambda: torch.device("cpu")
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, num_attention_heads=1, hidden_size=1, num_moe_experts=2, moe_router_topk=1,
    moe_router_pre_softmax=True, moe_token_dispatcher_type="allgather",
)  # fmt: skip
groups = ProcessGroupCollection.use_mpu_process_groups()
dispatcher = MoEAllGatherTokenDispatcher(2, [0, 1], config, groups)
first, second = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0], [5.0], [6.0]])
rows = dispatch(first, [1, 0, 1])
dispatch(second, [0, 1, 0])
y = combine(rows)
print(f"observed: the output of tokens 1, 2, 3 is {y.flatten().tolist()}")
print("expected: the output of tokens 1, 2, 3 is [1.0, 2.0, 3.0]")
sys.exit(int(not torch.equal(y, first)))
