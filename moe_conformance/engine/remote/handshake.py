"""Mutual authentication of both ends of a connection, before anything else is read from it.

All messages have a fixed size, so that no peer determines how much is read. In order:

    server -> client   MAGIC, a nonce
    client -> server   MAGIC, a subject, a nonce, HMAC(secret, "client" + subject + both nonces)
    server -> client   HMAC(secret, "server" + subject + both nonces)

Every proof contains the role of its end, so that a reflected proof is invalid, and both nonces, so that a replayed
proof is invalid. The server sends no proof to a client that has sent none.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from collections.abc import Callable

from ..records import EngineError

_MAGIC = b"ranks' agent 1"  # the version of this protocol
_NONCE = 32
_MAC = 32
SUBJECT = 16  # bytes of the text that says what a connection is for
_FIRST = len(_MAGIC) + _NONCE
_ANSWER = len(_MAGIC) + SUBJECT + _NONCE + _MAC


class HandshakeError(EngineError):
    """The other end did not prove that it knows the secret, or not in time."""


class ServerHandshake:
    """The server's side of the handshake for one connection; not blocking, so that one thread serves many.

    Usage: send `greeting`; feed what arrives, at most `wants` bytes at a time, until `wants` is 0; then send
    `proof`, and the connection is for `subject`.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = os.urandom(_NONCE)
        self._received = b""
        self.subject: bytes = b""
        self.proof: bytes = b""

    @property
    def greeting(self) -> bytes:
        """The first message to the client."""
        return _MAGIC + self._nonce

    @property
    def wants(self) -> int:
        """How many bytes are still to be received."""
        return _ANSWER - len(self._received)

    def feed(self, data: bytes) -> None:
        """Processes bytes that were received.

        Raises:
            HandshakeError: the client does not know the secret, or uses another protocol.
        """
        self._received += data
        known = min(len(self._received), len(_MAGIC))
        if self._received[:known] != _MAGIC[:known]:
            raise HandshakeError("a client used another protocol")
        if self.wants > 0:
            return
        subject, nonce, mac = _split(self._received[len(_MAGIC) :], SUBJECT, _NONCE)
        if not hmac.compare_digest(mac, _mac(self._secret, b"client", subject, self._nonce, nonce)):
            raise HandshakeError("a client had the wrong secret")
        self.subject = subject
        self.proof = _mac(self._secret, b"server", subject, self._nonce, nonce)


def client_handshake(end: socket.socket, secret: bytes, subject: bytes, *, greeting_s: float, limit_s: float) -> None:
    """Runs the client's side of the handshake on a connected socket, which is blocking afterwards.

    Args:
        end: The socket, which the caller closes after an error.
        secret: The secret that both ends must know.
        subject: SUBJECT bytes that say what the connection is for.
        greeting_s: The time limit for the server's first message: it may be busy.
        limit_s: The time limit for the rest.

    Raises:
        HandshakeError: the server does not know the secret, or was silent or too slow.
    """
    if len(subject) != SUBJECT:
        raise ValueError(f"a subject has {SUBJECT} bytes, not {len(subject)}")
    first = read_exactly(end, _FIRST, within(greeting_s))
    magic, theirs = _split(first, len(_MAGIC))
    if magic != _MAGIC:
        raise HandshakeError("the process at the driver's address uses another protocol")
    left = within(limit_s)
    ours = os.urandom(_NONCE)
    end.settimeout(left())
    try:
        end.sendall(_MAGIC + subject + ours + _mac(secret, b"client", subject, theirs, ours))
    except OSError as error:
        raise HandshakeError(f"the connection was lost: {error}") from None
    proof = read_exactly(end, _MAC, left)
    if not hmac.compare_digest(proof, _mac(secret, b"server", subject, theirs, ours)):
        raise HandshakeError("the process at the driver's address has the wrong secret")
    end.settimeout(None)


def within(seconds: float) -> Callable[[], float]:
    """Returns a function that returns how many of these seconds are left.

    Raises:
        HandshakeError: by the returned function, if none are left.
    """
    until = time.monotonic() + seconds

    def left() -> float:
        if (rest := until - time.monotonic()) <= 0:
            raise HandshakeError(f"the other end took longer than {seconds:.0f} s")
        return rest

    return left


def read_exactly(end: socket.socket, size: int, left: Callable[[], float]) -> bytes:
    """Returns the next `size` bytes; the time limit is for all of them together.

    Raises:
        HandshakeError: they did not come in time, or the connection ended before.
    """
    data = b""
    while len(data) < size:
        end.settimeout(left())
        try:
            taken = end.recv(size - len(data))
        except TimeoutError:
            continue  # `left` raises
        except OSError as error:
            raise HandshakeError(f"the connection broke: {error}") from None
        if not taken:
            raise HandshakeError("the other end closed the connection: it was refused, or the driver has ended")
        data += taken
    return data


def _mac(secret: bytes, role: bytes, subject: bytes, servers: bytes, clients: bytes) -> bytes:
    # No part has a length that a peer chooses, so that different parts never give equal bytes.
    return hmac.digest(secret, role + b"\0" + subject + servers + clients, "sha256")


def _split(data: bytes, *sizes: int) -> list[bytes]:
    parts = []
    for size in sizes:
        parts.append(data[:size])
        data = data[size:]
    return [*parts, data]
