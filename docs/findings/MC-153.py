"""MC-153: a model leaves the variables of its attention backend set, and one with another backend is refused.

Two models, one after the other, in one process. Exits 1 while the finding is there.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
told = {name for name in os.environ if name.startswith("NVTE_")}


def built(backend: AttnBackend) -> str:
    """Build a model with an attention backend, drop it, and say what came of it."""
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=4, use_cpu_initialization=True, attention_backend=backend
    )  # fmt: skip
    try:
        GPTModel(config, get_gpt_layer_local_spec(), 8, 4, position_embedding_type="none")
    except AssertionError:
        return "refused"
    return "built"


found = built(AttnBackend.auto), built(AttnBackend.unfused)
left = sorted({name for name in os.environ if name.startswith("NVTE_")} - told)
print(f"observed: a model with auto is {found[0]}, one with unfused after it is {found[1]}; {len(left)} variables stay")
print("expected: a model with auto is built, one with unfused after it is built; 0 variables stay")
sys.exit(int(found != ("built", "built") or bool(left)))
