"""NeMo Automodel 0.7: its MoE module with the torch dispatcher, the gate and the experts of it.

What the library does, as read in its code and observed here. All tokens, weights and ids are gathered on every rank of
ep, which computes its own experts for them; the outputs are added up over the ranks in float32. The routing weights are
applied between the up and the down projection, in float32. Experts are DTensors over ep, and their replicas are sharded
by FSDP2 along dimension 1; all else is sharded by FSDP2 over dp and cp. The trainer divides the gradients of experts by
the number of data parallel ranks, as FSDP2 divides all others. Its other dispatchers need a GPU.
"""

from __future__ import annotations

from moe_conformance.backends.automodel.backend import Automodel

__all__ = ["Automodel"]
