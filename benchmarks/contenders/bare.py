"""The floor: a loop under torchrun, without any framework. It ends at the first wrong case."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.contenders.ranks import run_and_judge
from benchmarks.timeline import assigned


def main() -> None:
    """Runs all cases on this rank."""
    assignment = assigned()
    dist.init_process_group("gloo")
    for number in range(assignment.count):
        run_and_judge(assignment, number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
