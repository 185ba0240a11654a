"""The experts without their shortcut for equal counts: always the loop."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moe_conformance.backends.native.layer.experts import Experts


class LoopedExperts(Experts):
    """What takes the place of `Experts` where batched products are not to be had.

    Implements: FAST-15.
    """

    @property
    def resolved(self) -> Mapping[str, str]:
        """The class that was built, which takes no shortcut."""
        return {**super().resolved, "optional": "none"}

    def _run(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        return self._loop(rows_PD, counts_N)
