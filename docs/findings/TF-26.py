"""TF-26: sequences of length zero are left out of cumulative lengths.

Exits 1 while the finding is there.
Needs: transformers>=5.24
"""

from __future__ import annotations

import sys

from transformers import DataCollatorWithFlattening

collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
bounds = collator([{"input_ids": ids} for ids in ([1, 2], [], [3])])["cu_seq_lens_q"].flatten().tolist()
try:
    alone = f"has the bounds {collator([{'input_ids': []}])['cu_seq_lens_q'].flatten().tolist()}"
except ValueError:
    alone = "raises"
print(f"observed: sequences of 2, 0 and 1 tokens have the bounds {bounds}; one of 0 tokens alone {alone}")
right = ([0, 2, 2, 3], "has the bounds [0, 0]")
print(f"expected: sequences of 2, 0 and 1 tokens have the bounds {right[0]}; one of 0 tokens alone {right[1]}")
sys.exit(int((bounds, alone) != right))
