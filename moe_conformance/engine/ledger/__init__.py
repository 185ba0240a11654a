"""The ledger: what every rank called of torch.distributed, and whether it fits together.

On a rank:

    tap.py           kernels below every collective; one recording per job
    operators.py     the operators of torch.distributed, and how to read their arguments
    recorder.py      calls turned into lines
    handle.py        what the caller of an asynchronous collective waits on
    poison.py        outputs that cannot be used too early by luck
    watch.py         the line that uses them too early

On the driver:

    entry.py         the records, and how to read the lines
    crosscheck.py    the ledgers of all ranks compared with each other; sizes.py and messages.py for each kind of call
    disagreement.py  what differs, and who is to blame
    table.py         the ledgers side by side
    counts.py        calls and bytes
"""

from __future__ import annotations
