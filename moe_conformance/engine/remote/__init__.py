"""Runs ranks under a launcher such as torchrun, on one machine or several.

Every process of the launcher but RANK 0's is an agent, which forks one rank. RANK 0's process is the driver.

    rendezvous.py    reads the launcher's environment, and connects agents to the driver
    secret.py        the secret that all processes of the job share
    handshake.py     both ends of a connection prove that they know the secret
    listener.py      the driver's listener, which no silent or slow client can block
    messages.py      the messages between driver and agents
    agent.py         an agent's main loop
    agent_client.py  the driver's connection to one agent
    hosts.py         starts ranks on all machines
    cluster.py       the machines, as an Engine takes them

Nothing that is received is unpickled before the handshake. What follows the handshake is neither encrypted nor signed.
"""

from __future__ import annotations
