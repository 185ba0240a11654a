"""MC-08: without a capacity factor the all-to-all dispatcher sends rows for slots that are empty.

One rank, four tokens, K = 2; one token has one expert. Exits 1 while the finding is there.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig


class Stream:
    """Nothing waits on a CPU."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing."""

    def record_event(self) -> Stream:
        """Return itself."""
        return self

    synchronize = record_event


torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.Stream = torch.cuda.current_stream = Stream
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, num_attention_heads=1, hidden_size=4, num_moe_experts=4, moe_router_topk=2,
    moe_token_dispatcher_type="alltoall",
)  # fmt: skip
dispatcher = MoEAlltoAllTokenDispatcher(4, [0, 1, 2, 3], config, ProcessGroupCollection.use_mpu_process_groups())
map_TE = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]]).bool()
hidden, _ = dispatcher.dispatch_preprocess(torch.ones(4, 4), map_TE, map_TE.float())
if moe_utils.permute(torch.ones(1, 4), torch.zeros(1, 4).bool(), num_out_tokens=1)[0].shape[0] == 0:
    print("not there: in this Megatron-Core permute returns a row for each entry of the map")  # 0.16
    sys.exit(77)
print(f"observed: {len(hidden)} rows are sent for {int(map_TE.sum())} slots")
print(f"expected: {int(map_TE.sum())} rows are sent for {int(map_TE.sum())} slots")
sys.exit(int(len(hidden) != map_TE.sum()))
