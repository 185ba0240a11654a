"""TF-12: a batch of no sequences is an error.

Exits 1 while the finding is there.
Needs: transformers<5.24
"""

from __future__ import annotations

import sys

from transformers import DataCollatorWithFlattening

collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
try:
    observed = f"input_ids of shape {tuple(collate([])['input_ids'].shape)}"
except (IndexError, ValueError) as error:
    observed = f"{type(error).__name__}: {error}"
print(f"observed: {observed}")
print("expected: input_ids of shape (1, 0), or a ValueError")
sys.exit(int(observed.startswith("IndexError")))
