"""Ports of loopback for tests that have to name one before anything listens there."""

from __future__ import annotations

import random
import socket

# Below those that systems give to whoever connects to somewhere or asks for any port: from 32768 on, or 49152.
_AMONG = range(20000, 32000)


def free_port() -> int:
    """Return a port at which nothing listens, and which what runs beside the test is not given in the meantime."""
    while True:
        port = random.choice(_AMONG)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
