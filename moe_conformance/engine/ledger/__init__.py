"""The ledger: records every collective that a rank calls, and checks that the ranks' calls match.

On a rank:

    tap.py           kernels that intercept every collective; one recording per job
    operators.py     the dispatcher operators of torch.distributed, and their arguments
    recorder.py      formats calls as lines
    ledger_file.py   the memory-mapped file that holds the lines
    handle.py        the Work object that the caller of an asynchronous collective receives
    poison.py        hides the output of an asynchronous collective until the wait
    watch.py         finds the line that uses the output before the wait

On the driver:

    entry.py         the records, and the parser of the lines
    crosscheck.py    compares the ledgers of all ranks; sizes.py compares collectives, send_recv.py messages
    disagreement.py  what differs, and which ranks are blamed
    table.py         the ledgers side by side; counts of calls and bytes
"""

from __future__ import annotations
