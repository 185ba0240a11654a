"""Ranks on machines of their own: one process of a launcher such as torchrun for each of them.

    rendezvous.py  what the launcher says in the environment, and how its processes find the driver
    secret.py      what they all know and nobody else does
    handshake.py   both ends of a connection prove that they know it
    listener.py   the driver's listener; a stranger, a silent or a slow peer cannot hold it up
    agent.py     what all processes but the driver's do
    proxy.py       an agent as the driver sees it
    site.py        all hosts of the job, for an Engine

Nothing that arrives is unpickled before the handshake. What follows it is neither encrypted nor signed.
"""

from __future__ import annotations
