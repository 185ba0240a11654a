"""The names of the ways in which the suite changes the parameters of experts between two forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from moe_conformance.workloads.records.workload import ParameterKey

# Recorded: by the version counters of the parameters. Unrecorded: without such a trace. Replaced: there is another
# tensor, storage or dtype afterwards. For sharded parameters "gathered again" is the only way.
Recorded = Literal["copy_", "add_", "load_state_dict", "a step of an optimiser"]
Unrecorded = Literal[".data.copy_", ".data = a new tensor", "a step of a fused optimiser", "a write in inference mode"]
Replaced = Literal["a new Parameter", "to another dtype and back", "to_empty", "gathered again"]
Way = Recorded | Unrecorded | Replaced

# Ways that change the module that holds the parameters; the others change the parameters only.
OF_THE_MODULE: tuple[Way, ...] = (
    "load_state_dict",
    "a write in inference mode",
    "a new Parameter",
    "to another dtype and back",
    "to_empty",
)
OF_SHARDS: tuple[Way, ...] = ("gathered again",)

Values = Mapping[ParameterKey, Tensor]
