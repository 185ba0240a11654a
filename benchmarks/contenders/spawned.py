"""torch's MultiProcessTestCase: processes are spawned and a group is made for each test."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

from benchmarks.contenders.ranks import run_and_judge
from benchmarks.timeline import assigned

ASSIGNMENT = assigned()


@instantiate_parametrized_tests
class TestCases(MultiProcessTestCase):
    """Each case in a world of its own."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return ASSIGNMENT.world

    def setUp(self) -> None:
        """Spawns the ranks."""
        super().setUp()
        self._spawn_processes()

    @parametrize("number", range(ASSIGNMENT.count))  # type: ignore[untyped-decorator]
    def test_case(self, number: int) -> None:
        """The step is the oracle's."""
        store = FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        run_and_judge(ASSIGNMENT, number)
