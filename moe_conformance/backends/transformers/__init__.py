"""transformers 5.23 and 5.24: its expert parallel implementations, its experts and its routers.

What the library does, as read in its code and observed here. Tensor ranks share one batch and never split an expert;
ep ranks hold whole experts; what is left over (`efsdp`, our edp) shards these by FSDP2. Expert gradients are divided by
the number of distinct batches, so that the loss is a mean over dp * cp. With ep = 1 no implementation stands before
the experts, whatever is asked for.
"""

from __future__ import annotations

from moe_conformance.backends.transformers.backend import Transformers

__all__ = ["Transformers"]
