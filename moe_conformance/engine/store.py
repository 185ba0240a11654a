"""The key-value store through which ranks find each other.

It lives in the driver, where no death of a rank can reach it, and listens on one interface alone: loopback where all
ranks are on the driver's machine.
"""

from __future__ import annotations

import socket
from datetime import timedelta

# Public as torch.distributed.TCPStore and so on, but type checkers see them here only.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

# Longer than any deadline: were a timeout inside the ranks to come first, all of them would err at once.
FOREVER = timedelta(days=1)


class StoreServer:
    """The driver's store at one of its numeric addresses; it closes when this object is dropped."""

    def __init__(self, address: str) -> None:
        listener = listen(address)
        self._generation = 0
        self.port: int = listener.getsockname()[1]
        self._server = serve(listener)

    def fresh_prefix(self) -> str:
        """Returns a prefix that no ranks have used: gloo would connect to addresses of ranks that are gone."""
        self._generation += 1
        return f"generation{self._generation}"


def join(address: str, port: int, prefix: str) -> Store:
    """Connects a rank to the driver's store; all its keys begin with `prefix`."""
    client = TCPStore(address, port, timeout=FOREVER, wait_for_workers=False)
    return PrefixStore(prefix, client)


def listen(address: str, port: int = 0) -> socket.socket:
    """Opens the socket of a store; whoever connects waits until it is served. Port 0 is any that is free."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def serve(listener: socket.socket) -> Store:
    """Serves a store, in a thread, for as long as what is returned lives."""
    address, port = listener.getsockname()[:2]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
