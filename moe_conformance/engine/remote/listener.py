"""The driver's listener. One thread serves all clients at once; what does not prove itself soon is dropped."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Collection

from .handshake import HandshakeError, ServerHandshake

_LIMIT_S = 10.0  # for the whole handshake
_MOST = 256  # clients that have not proved themselves; the eldest makes room


class _Client:
    """A connection that has not proved itself."""

    def __init__(self, end: socket.socket, secret: bytes) -> None:
        self.end = end
        self.until = time.monotonic() + _LIMIT_S
        self.handshake = ServerHandshake(secret)
        end.setblocking(False)

    def greet(self) -> None:
        """Sends the first word; it fits into any empty send buffer."""
        self.end.send(self.handshake.greeting)

    def hear(self) -> bool:
        """Takes in what has arrived; returns True once the client has proved itself."""
        data = self.end.recv(self.handshake.wants)
        if not data:
            raise HandshakeError("a client left")
        self.handshake.feed(data)
        if self.handshake.wants:
            return False
        self.end.send(self.handshake.proof)
        return True


class Listener:
    """Listens at one address and passes on connections that proved to have the secret.

    Args:
        address: The address of one interface, never that of all.
        secret: What clients must know.
        port: 0 for any that is free.

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
        self._clients: list[_Client] = []  # the eldest first
        self._here: dict[bytes, socket.socket] = {}
        self.refused: str | None = None  # why the latest client that was sent away was

    def wait(self, subjects: Collection[bytes], patience_s: float) -> dict[bytes, socket.socket]:
        """Returns those of these connections that are there within `patience_s`; they are blocking.

        The first connection for a subject counts; others are closed. Callers with other subjects are kept for
        a later call.
        """
        until = time.monotonic() + patience_s
        while not self._here.keys() >= set(subjects) and (left := until - time.monotonic()) > 0:
            self._serve(left)
        return {subject: self._here.pop(subject) for subject in subjects if subject in self._here}

    def close(self) -> None:
        """Closes the listener and connections that were not waited for; those passed on stay."""
        for client in list(self._clients):
            self._drop(client)
        for end in self._here.values():
            end.close()
        self._here.clear()
        self._selector.close()
        self._listener.close()

    def _serve(self, patience_s: float) -> None:
        soonest = min([patience_s, *(max(0.0, client.until - time.monotonic()) for client in self._clients[:1])])
        for key, _ in self._selector.select(soonest):
            if key.data is None:
                self._accept()
            elif key.data in self._clients:  # not dropped a moment ago to make room
                self._progress(key.data)
        while self._clients and self._clients[0].until <= time.monotonic():
            self._drop(self._clients[0], "a client was silent or too slow")

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # the client is gone again
            return
        if len(self._clients) >= _MOST:
            self._drop(self._clients[0], "too many clients")
        client = _Client(end, self._secret)
        self._clients.append(client)
        self._selector.register(end, selectors.EVENT_READ, client)
        with contextlib.suppress(OSError):
            client.greet()

    def _progress(self, client: _Client) -> None:
        try:
            if not client.hear():
                return
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            self._drop(client, str(error))
            return
        self._selector.unregister(client.end)
        self._clients.remove(client)
        if client.handshake.subject in self._here:
            client.end.close()
            return
        client.end.setblocking(True)
        self._here[client.handshake.subject] = client.end

    def _drop(self, client: _Client, why: str | None = None) -> None:
        self.refused = why or self.refused
        self._clients.remove(client)
        self._selector.unregister(client.end)
        client.end.close()
