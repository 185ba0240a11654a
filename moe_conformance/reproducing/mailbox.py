"""Messages between ranks through the store of their launcher, independent of the collectives under test.

Any process that reaches the store can write into it, and values are pickled. So every value is signed with a secret
that only the ranks know, and a value with a wrong signature is not unpickled.
"""

from __future__ import annotations

import hmac
import struct
import time
from collections.abc import Sequence
from typing import Any

from moe_conformance.engine import EngineError, store, wire

INTERVAL_S = 0.1  # seconds between two polls
_CHUNK = 1 << 20  # bytes; a store takes no more than 8 MiB at a time
_NUMBER = struct.Struct("<Q")


class Mailbox:
    """A store of values by key, which are put once. Every thread needs a separate one: calls of a store block."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        """Connect to the store."""
        self._store = store.join(address, port, "moe-conformance")
        self._secret = secret

    def put(self, key: str, value: object) -> None:
        """Store a value; the key is set last, so that the value is complete once the key exists."""
        data = _joined(wire.dumps(value))
        starts = range(0, len(data), _CHUNK)
        for start in starts:
            self._store.set(f"{key}/{start // _CHUNK}", data[start : start + _CHUNK])  # type: ignore[arg-type]  # bytes, too
        self._store.set(key, f"{len(starts)} {self._signature(key, data)}")

    def there(self, key: str) -> bool:
        """Return whether a value was put."""
        return bool(self._store.check([key]))

    def take(self, key: str) -> Any:
        """Wait for a value and return it.

        Raises:
            EngineError: the value was not put by a rank of this script.
        """
        while not self.there(key):  # Ctrl-C ends this loop, but not a wait of the store
            time.sleep(INTERVAL_S)
        count, _, signature = bytes(self._store.get(key)).decode().partition(" ")
        data = b"".join(self._store.get(f"{key}/{number}") for number in range(int(count)))
        if not hmac.compare_digest(signature, self._signature(key, data)):
            raise EngineError(f"the value of {key!r} in the store was put there by no rank of this script")
        return wire.loads(_parted(data))

    def say(self, key: str, words: str) -> None:
        """Store a short text, replacing an earlier one."""
        self._store.set(key, words)

    def _signature(self, key: str, data: bytes) -> str:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256").hex()

    def said(self, key: str) -> str:
        """Return the latest text of a key, "" if there is none."""
        return bytes(self._store.get(key)).decode() if self.there(key) else ""


def _joined(buffers: Sequence[wire.Buffer]) -> bytes:
    parts: list[wire.Buffer] = []
    for buffer in buffers:
        parts += [_NUMBER.pack(memoryview(buffer).nbytes), buffer]
    return b"".join(parts)


def _parted(data: bytes) -> list[bytearray]:
    """Return the joined buffers as writable buffers, as tensors need them."""
    buffers: list[bytearray] = []
    at = 0
    while at < len(data):
        (size,) = _NUMBER.unpack_from(data, at)
        at += _NUMBER.size
        buffers.append(bytearray(data[at : at + size]))
        at += size
    return buffers
