"""The TCPStore of the driver, through which ranks find each other.

It is a part of the driver's process, so that no rank's exit ends it, and listens on one interface only: loopback if all
ranks are on the driver's machine.
"""

from __future__ import annotations

import socket
from datetime import timedelta

# Public as torch.distributed.TCPStore and so on, but type checkers find them only here.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

# Longer than any deadline: if a timeout in the ranks came first, all of them would raise at once.
FOREVER = timedelta(days=1)


class StoreServer:
    """The driver's store, listening at one numeric address; it closes when this object is deleted."""

    def __init__(self, address: str) -> None:
        listener = listen(address)
        self._generation = 0
        self.port: int = listener.getsockname()[1]
        self._server = serve(listener)

    def fresh_prefix(self) -> str:
        """Returns a new prefix, so that new ranks do not read the addresses of ranks that have ended."""
        self._generation += 1
        return f"generation{self._generation}"


def join(address: str, port: int, prefix: str) -> Store:
    """Connects a rank to the driver's store; all its keys begin with `prefix`."""
    client = TCPStore(address, port, timeout=FOREVER, wait_for_workers=False)
    return PrefixStore(prefix, client)


def listen(address: str, port: int = 0) -> socket.socket:
    """Opens the listening socket of a store; connections wait until it is served. Port 0 selects a free one."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def serve(listener: socket.socket) -> Store:
    """Serves a store on a listening socket, in a thread, until the returned object is deleted."""
    address, port = listener.getsockname()[:2]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
