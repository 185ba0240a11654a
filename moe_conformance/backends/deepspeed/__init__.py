"""DeepSpeed 0.19: its MoE layer of GShard's kind, the parts of it, and the router of AutoEP.

What the library does, as read in its code and observed here. A gate gives every routed pair a place among the C of its
expert, C is the same for all experts, and every rank sends every expert C rows, filled or not. Gates compute in
float32. With one choice the weight is the score; with more, weights are divided by the sum of those that were kept.
Tensor ranks hold the same tokens. Experts are the user's modules, whole on one rank each. The engine divides all
gradients by the number of data parallel ranks.
"""

from __future__ import annotations

from moe_conformance.backends.deepspeed.backend import DeepSpeed

__all__ = ["DeepSpeed"]
