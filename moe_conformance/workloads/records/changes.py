"""In which ways the suite changes the parameters of experts between two forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from moe_conformance.workloads.records.workload import ParameterKey

# Those that the version counters of the parameters record, those that leave no such trace, and those after which there
# is another tensor, another storage or another dtype. Of sharded parameters "gathered again" alone can be told.
Recorded = Literal["copy_", "add_", "load_state_dict", "a step of an optimiser"]
Unrecorded = Literal[".data.copy_", ".data = a new tensor", "a step of a fused optimiser", "a write in inference mode"]
Replaced = Literal["a new Parameter", "to another dtype and back", "to_empty", "gathered again"]
Way = Recorded | Unrecorded | Replaced

# Ways that are ways of the module that holds the parameters; the others are of the parameters alone.
OF_THE_MODULE: tuple[Way, ...] = (
    "load_state_dict",
    "a write in inference mode",
    "a new Parameter",
    "to another dtype and back",
    "to_empty",
)
OF_SHARDS: tuple[Way, ...] = ("gathered again",)

Values = Mapping[ParameterKey, Tensor]
