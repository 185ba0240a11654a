"""The driver's listener. One thread serves all callers at once; what does not prove itself soon is dropped."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Collection

from .handshake import Doorkeeper, HandshakeError

_LIMIT_S = 10.0  # for the whole handshake
_MOST = 256  # callers that have not proved themselves; the eldest makes room


class _Caller:
    """A connection that has not proved itself."""

    def __init__(self, end: socket.socket, secret: bytes) -> None:
        self.end = end
        self.until = time.monotonic() + _LIMIT_S
        self.keeper = Doorkeeper(secret)
        end.setblocking(False)

    def greet(self) -> None:
        """Sends the first word; it fits into any empty send buffer."""
        self.end.send(self.keeper.greeting)

    def hear(self) -> bool:
        """Takes in what has arrived; returns True once the caller has proved itself."""
        data = self.end.recv(self.keeper.wants)
        if not data:
            raise HandshakeError("a caller left")
        self.keeper.feed(data)
        if self.keeper.wants:
            return False
        self.end.send(self.keeper.proof)
        return True


class Reception:
    """Listens at one address and passes on connections that proved to have the secret.

    Args:
        address: The address of one interface, never that of all.
        secret: What callers must know.
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
        self._callers: list[_Caller] = []  # the eldest first
        self._here: dict[bytes, socket.socket] = {}
        self.refused: str | None = None  # why the latest caller that was sent away was

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
        for caller in list(self._callers):
            self._drop(caller)
        for end in self._here.values():
            end.close()
        self._here.clear()
        self._selector.close()
        self._listener.close()

    def _serve(self, patience_s: float) -> None:
        soonest = min([patience_s, *(max(0.0, caller.until - time.monotonic()) for caller in self._callers[:1])])
        for key, _ in self._selector.select(soonest):
            if key.data is None:
                self._accept()
            elif key.data in self._callers:  # not dropped a moment ago to make room
                self._progress(key.data)
        while self._callers and self._callers[0].until <= time.monotonic():
            self._drop(self._callers[0], "a caller was silent or too slow")

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # the caller is gone again
            return
        if len(self._callers) >= _MOST:
            self._drop(self._callers[0], "too many callers")
        caller = _Caller(end, self._secret)
        self._callers.append(caller)
        self._selector.register(end, selectors.EVENT_READ, caller)
        with contextlib.suppress(OSError):
            caller.greet()

    def _progress(self, caller: _Caller) -> None:
        try:
            if not caller.hear():
                return
        except BlockingIOError:
            return
        except (OSError, HandshakeError) as error:
            self._drop(caller, str(error))
            return
        self._selector.unregister(caller.end)
        self._callers.remove(caller)
        if caller.keeper.subject in self._here:
            caller.end.close()
            return
        caller.end.setblocking(True)
        self._here[caller.keeper.subject] = caller.end

    def _drop(self, caller: _Caller, why: str | None = None) -> None:
        self.refused = why or self.refused
        self._callers.remove(caller)
        self._selector.unregister(caller.end)
        caller.end.close()
