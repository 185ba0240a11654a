"""Megatron-Core, 0.16 to 0.20 and dev: its token dispatchers, router and experts, on CPU ranks over gloo or on GPUs.

backend.py        the backend: variants, versions, limits, the groups that it would build
session.py        one topology: the library's parallel state, and the end of a step
surfaces.py       the parts of one MoELayer as exchange, experts and router
configuration.py  from the suite's Config to a TransformerConfig
overlap.py        a model under the combined 1F1B schedule
delayed.py        linear layers that defer weight gradients
differences.py    what differs between versions, found by looking at the library
meter.py          the tracker of overload factors, which the branch dev has
library.py        imports Megatron-Core; the ranks preload it
shims.py          what the library needs where there is no CUDA
"""

from __future__ import annotations

from moe_conformance.backends.megatron_core.backend import MegatronCore

__all__ = ["MegatronCore"]
