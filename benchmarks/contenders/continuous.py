"""torch's MultiProcContinuousTest: processes and group are kept, and each test's name is sent to them."""

from __future__ import annotations

from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

from benchmarks.contenders.ranks import run_and_judge
from benchmarks.timeline import assigned

ASSIGNMENT = assigned()


@instantiate_parametrized_tests
class TestCases(MultiProcContinuousTest):
    """All cases in one world."""

    world_size = ASSIGNMENT.world

    @classmethod
    def backend_str(cls) -> str:
        """The transport."""
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        """The device, also where there is a GPU."""
        return "cpu"

    @parametrize("number", range(ASSIGNMENT.count))  # type: ignore[untyped-decorator]
    def test_case(self, number: int) -> None:
        """The step is the oracle's."""
        run_and_judge(ASSIGNMENT, number)
