"""VO-03: training fails after a first forward in inference mode, with experts in FSDP2.

Plain products take the place of the kernels. Exits 1 while the finding is there.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

# The packages are entered without what they import first, models of one version of transformers.
ROOT = importlib.util.find_spec("veomni").submodule_search_locations[0]


def package(name: str) -> None:
    """Enter a package without its __init__."""
    sys.modules[name] = found = ModuleType(name)
    found.__path__ = [ROOT + name.removeprefix("veomni").replace(".", "/")]


for name in ("veomni", "veomni.distributed", "veomni.utils", "veomni.distributed.moe"):
    package(name)
for name in ("veomni.utils.import_utils", "veomni.distributed.parallel_state"):
    sys.modules[name] = stub = ModuleType(name)
    vars(stub).update(is_torch_npu_available=lambda: True, get_parallel_state=None)


def rows_by_weights(a: torch.Tensor, b: torch.Tensor, transpose_b: bool, **_: Any) -> torch.Tensor:
    """Multiply the rows of one expert."""
    return a @ (b[0].T if transpose_b else b[0])


def rows_by_rows(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **_: Any) -> None:
    """Write the gradient of one expert's weights."""
    c[0] = a.T @ b


class Experts(nn.Module):
    """One expert."""

    def __init__(self) -> None:
        """Draw its weights."""
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(1, 4, 4)) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Call the library's function."""
        from veomni.distributed.moe import moe_layer

        moe_layer.group_gemm_same_nk, moe_layer.group_gemm_same_mn = rows_by_weights, rows_by_rows
        return moe_layer.EPGroupGemm.apply(rows, torch.tensor([len(rows)]), self.gate, self.up, self.down)


def trained(mode: Any) -> str:
    """Train behind a forward in some mode."""
    experts, rows = fully_shard(Experts(), reshard_after_forward=True), torch.randn(2, 4)
    try:
        with mode():
            experts(rows)
        experts(rows).sum().backward()
    except RuntimeError as error:
        return f"raises: {str(error).splitlines()[0]}"
    return "works"


dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
dist.init_device_mesh("cpu", (1,))
found = trained(torch.no_grad), trained(torch.inference_mode)
print(f"observed: after no_grad training {found[0]}; after inference mode it {found[1]}")
print("expected: after no_grad training works; after inference mode it works")
sys.exit(int(found != ("works", "works")))
