"""torchtitan 0.3 and its main since: its token dispatchers, grouped experts, router and MoE module.

What the library does, as read in its code and observed here. The scores are applied in `combine`, in float32, and
nowhere else; the experts multiply in bfloat16 whatever the parameters are; FSDP2 shards the experts over the ranks that
replicate them (its mesh axis `efsdp`, our edp) and sums their gradients without division, because the loss is divided
by the token count of all ranks beforehand.

The library's default for collectives, `spmd_types`, uses the list form of all-to-all, for which gloo needs equal
sizes; `partial_dtensor`, another of its settings, uses all_to_all_single and is what runs here.
"""

from __future__ import annotations

from moe_conformance.backends.torchtitan.backend import TorchTitan

__all__ = ["TorchTitan"]
