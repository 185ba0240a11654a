"""DET: backends that leave the settings of their process otherwise than they were."""

from __future__ import annotations

import warnings
from typing import ClassVar

import torch

from moe_conformance.backends.native import Native, NativeSession
from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange
from moe_conformance.backends.native.layer.experts import Experts
from moe_conformance.backends.native.row_ops.surface import Permutation
from moe_conformance.contract import Config, Topology
from self_tests.planted_bugs.plant import EP2_EDP2, Expectation, planted

_OPEN = "from opening to closing, on rank 0 "


@planted(
    Expectation("DET-07", "own-even-bfloat16", "run", f"cuDNN's benchmarks, {_OPEN}is 'True' instead of 'False'"),
    layout=EP2_EDP2,
)
class ExpertsTryKernelsOut(Experts):
    """Building the experts has cuDNN try kernels out, in the whole process."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        torch.backends.cudnn.benchmark = True


@planted(
    Expectation(
        "DET-07",
        "own-even-bfloat16",
        "run",
        f"the default dtype, {_OPEN}is 'torch.bfloat16' instead of 'torch.float32'",
    ),
    layout=EP2_EDP2,
)
class DefaultDtypeBehindARefusal(AllToAllExchange):
    """The default dtype is the model's while an exchange is built, and is put back unless building fails."""

    def __init__(self, config: Config, topology: Topology) -> None:
        torch.set_default_dtype(config.dtype)
        super().__init__(config, topology)
        torch.set_default_dtype(torch.float32)


@planted(
    Expectation(
        *("DET-07", "own-even-bfloat16", "run", f"torch.backends.mkldnn.matmul, {_OPEN}is 'bf16' instead of 'none'")
    ),
    layout=EP2_EDP2,
)
class ProductsRoundedToBFloat16(Experts):
    """Building the experts has oneDNN round float32 products to bfloat16, in the whole process."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        super().__init__(config, topology, device)
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]


@planted(
    Expectation("DET-07", "own-even-bfloat16", "run", f"the number of threads, {_OPEN}is '3' instead of '1'"),
    layout=EP2_EDP2,
)
class PermutationOnThreeThreads(Permutation):
    """Building a permutation, which no training step does by itself, sets the number of threads."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        torch.set_num_threads(3)


class FiltersResetAtTheEnd(NativeSession):
    """Closing a session forgets all filters of warnings, also those that were there before it."""

    def close(self) -> None:
        warnings.resetwarnings()


@planted(
    Expectation("DET-07", "own-even-bfloat16", "run", f"the warning filters, {_OPEN}has [] more and [", "less"),
    layout=EP2_EDP2,
)
class NativeThatResetsFilters(Native):
    """Closing a session forgets all filters of warnings, also those that were there before it."""

    name = "native-that-resets-filters"
    session_class = FiltersResetAtTheEnd


@planted(
    Expectation(
        *("DET-07", "own-even-bfloat16", "run", "the environment variable MOE_CONFORMANCE_QUIET, by importing"),
        "on rank 0 is 'yes' instead of 'not set'",
    ),
    layout=EP2_EDP2,
)
class NativeThatSpeaksAtTheDoor(Native):
    """Importing what the backend wants to be imported sets a variable of the environment of all children."""

    name = "native-that-speaks-at-the-door"
    preload: ClassVar[tuple[str, ...]] = ("self_tests.lying_backends.loud_import",)
