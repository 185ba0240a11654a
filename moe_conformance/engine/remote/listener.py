"""The driver's listening socket: one thread authenticates all clients and drops those that are slow."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Collection

from .handshake import HandshakeError, ServerHandshake

_LIMIT_S = 10.0  # for the whole handshake
_MOST = 256  # clients that are not authenticated yet; the oldest is dropped for a new one


class _Client:
    """A connection that is not authenticated yet."""

    def __init__(self, end: socket.socket, secret: bytes) -> None:
        self.end = end
        self.until = time.monotonic() + _LIMIT_S
        self.handshake = ServerHandshake(secret)
        end.setblocking(False)

    def greet(self) -> None:
        """Sends the first message, which fits into an empty send buffer."""
        self.end.send(self.handshake.greeting)

    def process(self) -> bool:
        """Processes what has been received; returns True once the client is authenticated."""
        data = self.end.recv(self.handshake.wants)
        if not data:
            raise HandshakeError("a client left")
        self.handshake.feed(data)
        if self.handshake.wants:
            return False
        self.end.send(self.handshake.proof)
        return True


class Listener:
    """Listens at one address, and returns connections whose other end knows the secret.

    Args:
        address: The address of one interface, never that of all.
        secret: The secret that clients must know.
        port: 0 selects a free one.

    Raises:
        OSError: the address is not one of this machine, or the port is taken.
    """

    def __init__(self, address: str, secret: bytes, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._secret = secret
        self._listener = socket.create_server((address, port), family=family, backlog=_MOST)
        self._listener.setblocking(False)
        self.address: str = address
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._clients: list[_Client] = []  # the oldest first
        self._accepted: dict[bytes, socket.socket] = {}
        self.refused: str | None = None  # why the latest client that was dropped was

    def wait(self, subjects: Collection[bytes], patience_s: float) -> dict[bytes, socket.socket]:
        """Returns the connections for these subjects that are made within `patience_s`; they are blocking.

        Of several connections for a subject the first is returned, the others are closed. Connections for other
        subjects are kept for a later call.
        """
        until = time.monotonic() + patience_s
        while not self._accepted.keys() >= set(subjects) and (left := until - time.monotonic()) > 0:
            self._serve(left)
        return {subject: self._accepted.pop(subject) for subject in subjects if subject in self._accepted}

    def close(self) -> None:
        """Closes the listener and all connections that `wait` has not returned."""
        for client in list(self._clients):
            self._drop(client)
        for end in self._accepted.values():
            end.close()
        self._accepted.clear()
        self._selector.close()
        self._listener.close()

    def _serve(self, patience_s: float) -> None:
        soonest = min([patience_s, *(max(0.0, client.until - time.monotonic()) for client in self._clients[:1])])
        for key, _ in self._selector.select(soonest):
            if key.data is None:
                self._accept()
            elif key.data in self._clients:  # not dropped just now for a new one
                self._process(key.data)
        while self._clients and self._clients[0].until <= time.monotonic():
            self._drop(self._clients[0], "a client was silent or too slow")

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # the client has disconnected
            return
        if len(self._clients) >= _MOST:
            self._drop(self._clients[0], "too many clients")
        client = _Client(end, self._secret)
        self._clients.append(client)
        self._selector.register(end, selectors.EVENT_READ, client)
        with contextlib.suppress(OSError):
            client.greet()

    def _process(self, client: _Client) -> None:
        try:
            if not client.process():
                return
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            self._drop(client, str(error))
            return
        self._selector.unregister(client.end)
        self._clients.remove(client)
        if client.handshake.subject in self._accepted:
            client.end.close()
            return
        client.end.setblocking(True)
        self._accepted[client.handshake.subject] = client.end

    def _drop(self, client: _Client, why: str | None = None) -> None:
        self.refused = why or self.refused
        self._clients.remove(client)
        self._selector.unregister(client.end)
        client.end.close()
