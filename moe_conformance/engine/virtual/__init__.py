"""Virtual ranks: a world of up to hundreds of ranks, each a thread of one process; one runs at a time.

They show errors in index arithmetic at sizes for which no test machine has enough GPUs. `threads.py` describes how they
differ from real ranks.

    scheduler.py    which thread runs: a rank runs until it waits for others
    matching.py     matches calls: pending collectives, sends and receives
    collectives.py  performs a collective on the tensors of all ranks
    mismatch.py     the exception for calls that do not match
    group.py        the process group; everything that depends on torch's internals
    recorder.py     the ledger of a virtual rank
    rank_state.py   global state of the process that every rank has for itself
    threads.py      the ranks' side: runs a job on all threads
    world.py        the driver's side
"""

from __future__ import annotations
