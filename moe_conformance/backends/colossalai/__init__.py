"""Colossal-AI 0.5: the blocks that it puts in the place of the MoE blocks of Mixtral, DeepSeek and DeepSeek-V3.

What the library does, as read in its code and observed here. One row travels for each routed pair, sorted by expert.
Every expert is a module, called where it has rows: of each source rank by itself in the first two blocks, of all ranks
together in that of V3. Weights are applied behind the return, in the dtype of tokens. In the backward, gradients at an
expert are divided by the ranks of ep, and multiplied by its replicas over those of them that have tokens for it. Its
ZeRO optimizer averages the gradients of experts over replicas, and all others over data parallel ranks. The gate is a
model's own, which the blocks of DeepSeek call; that of Mixtral is part of the block.
"""

from __future__ import annotations

from moe_conformance.backends.colossalai.backend import ColossalAI

__all__ = ["ColossalAI"]
