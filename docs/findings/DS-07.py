"""DS-07: a process that ended while it compiled for CPUs leaves a lock for which all later ones wait.

Exits 1 while the finding is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CODE = """
import tempfile
import torch.distributed as dist
from deepspeed import comm
dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
comm.init_distributed("gloo")
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "deepspeed_shm_comm_op"
        compiled.mkdir()
        (compiled / "lock").touch()  # as it is left there
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": folder}
        try:
            subprocess.run([sys.executable, "-c", CODE], env=environment, timeout=15, capture_output=True, check=True)
            found = "returns"
        except subprocess.TimeoutExpired:
            found = "waits"
    print(f"observed: init_distributed beside a lock that nobody holds {found}")
    print("expected: init_distributed beside a lock that nobody holds returns")
    sys.exit(int(found == "waits"))
