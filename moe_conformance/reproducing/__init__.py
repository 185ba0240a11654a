"""Run one check on one case without pytest, for the scripts that a failure leaves in the report folder.

Each process is one rank, in which the backend runs as in any program: a debugger and prints in the adapter work.

    __init__.py    what a script calls
    processes.py   starts the ranks as processes, if no launcher has
    mailbox.py     messages between ranks, through a store
    secrets.py     the secret that signs these messages
    rank.py        joins the other ranks and runs what rank 0 sends
    looking.py     a thread of every rank that reports its stack
    gathering.py   rank 0: sends a workload to all ranks, and collects the results
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
    Exit status: 1 if the check fails, 0 if it passes, 2 if it cannot run here. Rank 0 prints the verdict.

    Args:
        backend: A registered name or pkg.mod:Class.
        requirement: The id that the check decides.
        check: `test_file:TestClass.test_name`, of moe_conformance/distributed_tests.
        variant: Variant of the backend.
        layout: For example `ep2-edp2`.
        workload: Name of a workload of the profile.
        ranks: The number of ranks of the layout.
        device: cpu or cuda.
        profile: quick or full.
        asynchrony: Mode of asynchronous collectives of workloads that name none.
        deadline_s: A rank without a result after so many seconds counts as hung; None waits for ever, as a debugger
            needs. A deadlock, in which all ranks wait in collectives, is detected in any case.
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
