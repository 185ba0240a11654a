"""How ranks send each other what they saw: through the store of their launcher, past the collectives under test.

Whoever reaches the store may write into it, and values are pickled: each is signed with a secret that only the ranks
know, and none is read whose signature is wrong.
"""

from __future__ import annotations

import hmac
import struct
import time
from collections.abc import Sequence
from typing import Any

from moe_conformance.engine import EngineError, store, wire

INTERVAL_S = 0.1  # between two looks
_CHUNK = 1 << 20  # bytes; a store takes no more than 8 MiB at a time
_NUMBER = struct.Struct("<Q")


class Mailbox:
    """Values by key, each put once. Every thread needs its own: a store waits for one answer at a time."""

    def __init__(self, address: str, port: int, secret: bytes) -> None:
        """Connect to the store."""
        self._store = store.join(address, port, "moe-conformance")
        self._secret = secret

    def put(self, key: str, value: object) -> None:
        """Leave a value; whoever sees the key can take all of it."""
        data = _joined(wire.dumps(value))
        starts = range(0, len(data), _CHUNK)
        for start in starts:
            self._store.set(f"{key}/{start // _CHUNK}", data[start : start + _CHUNK])  # type: ignore[arg-type]  # bytes, too
        self._store.set(key, f"{len(starts)} {self._signature(key, data)}")

    def there(self, key: str) -> bool:
        """Tell whether a value was put."""
        return bool(self._store.check([key]))

    def take(self, key: str) -> Any:
        """Wait for a value and return it.

        Raises:
            EngineError: no rank has put it.
        """
        while not self.there(key):  # Ctrl-C ends it, as it would not end a wait of the store
            time.sleep(INTERVAL_S)
        count, _, signature = bytes(self._store.get(key)).decode().partition(" ")
        data = b"".join(self._store.get(f"{key}/{number}") for number in range(int(count)))
        if not hmac.compare_digest(signature, self._signature(key, data)):
            raise EngineError(f"the value of {key!r} in the store was put there by no rank of this script")
        return wire.loads(_parted(data))

    def say(self, key: str, words: str) -> None:
        """Leave a short text in the place of an earlier one."""
        self._store.set(key, words)

    def _signature(self, key: str, data: bytes) -> str:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256").hex()

    def said(self, key: str) -> str:
        """Return the latest text, "" if there is none."""
        return bytes(self._store.get(key)).decode() if self.there(key) else ""


def _joined(buffers: Sequence[wire.Buffer]) -> bytes:
    return b"".join(part for each in buffers for part in (_NUMBER.pack(memoryview(each).nbytes), each))


def _parted(data: bytes) -> list[bytearray]:
    """Return the buffers, writable as tensors need them."""
    buffers: list[bytearray] = []
    at = 0
    while at < len(data):
        (size,) = _NUMBER.unpack_from(data, at)
        at += _NUMBER.size
        buffers.append(bytearray(data[at : at + size]))
        at += size
    return buffers
