"""One check on one case without pytest, for scripts that a failure leaves in the report folder.

Each process is one rank, in which the backend runs as in any program: a debugger and prints in the adapter work.

    __init__.py    what a script calls
    processes.py   the ranks as processes of one script, where no launcher has started them
    mailbox.py     how ranks send each other what they saw
    secrets.py     the secret with which they sign it
    rank.py        what each rank does
    looking.py     the thread of a rank that says where it stands
    gathering.py   rank 0: sends a workload to all ranks, and puts together what came of it
    checks.py      rank 0: finds case and check by name, and calls the check
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def reproduce(
    *,
    backend: str,
    requirement: str,
    check: str,
    variant: str,
    layout: str,
    workload: str,
    ranks: int,
    device: str = "cpu",
    profile: str = "quick",
    asynchrony: str = "plain",
    deadline_s: float | None = None,
) -> NoReturn:
    """Run a workload through a backend, judge it by a check, and end this process.

    Under a launcher such as torchrun this process is one rank. Without one it starts all ranks itself, on this machine.
    Exit status: 1 if the check fails, 0 if it passes, 2 if it cannot run here. The sentence is printed by rank 0.

    Args:
        backend: A registered name or pkg.mod:Class.
        requirement: The id that the check decides.
        check: `test_file:TestClass.test_name`, of moe_conformance/distributed_tests.
        variant: Of the backend.
        layout: For example `ep2-edp2`.
        workload: Its name in the profile's corpus.
        ranks: The number of ranks of the layout.
        device: cpu or cuda.
        profile: quick or full.
        asynchrony: Mode of asynchronous collectives of workloads that name none.
        deadline_s: Ranks that give no answer for so long hang; None waits for ever, as a debugger needs it. That all
            ranks wait for each other in collectives is noticed without.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as the ranks of a run have it
    from moe_conformance.reproducing import processes  # imports torch
    from moe_conformance.reproducing.checks import Named
    from moe_conformance.reproducing.gathering import work

    named = Named(backend, requirement, check, variant, layout, workload, ranks, device, profile, asynchrony)
    if "RANK" not in os.environ and (status := processes.start(ranks)) is not None:
        sys.exit(status)
    work(named, deadline_s)
