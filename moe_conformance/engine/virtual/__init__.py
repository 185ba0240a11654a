"""Virtual ranks: a world of hundreds of ranks as threads of one process, one running at a time.

They show what index arithmetic does at sizes that no test machine has. What they are not is in `threads.py`.

    turns.py       who runs: a rank goes on until it waits for others
    collective.py     where ranks wait for each other: a collective, a message
    moves.py       what a collective does to its tensors, and who disagrees
    group.py       the process group; all that rests on torch's internals
    private.py     global state of the process that every rank has for itself
    threads.py     the ranks' side: a job on all threads
    world.py       the driver's side
"""

from __future__ import annotations
