"""The memory-mapped file of a rank's ledger, to which a line is written without a system call.

What is written stays readable after the rank was killed. The first eight bytes hold the number of bytes that follow;
they are written after the lines, so that a reader always finds complete lines.
"""

from __future__ import annotations

import mmap
import os
import struct

_LENGTH = struct.Struct("<Q")
_FIRST_SIZE = 1 << 18


class LedgerFile:
    """The rank's side of the file; one thread at a time may write.

    Args:
        descriptor: The descriptor of the file, which is empty or was written by another LedgerFile of the same rank.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._end = _LENGTH.size
        self._map = self._grown(max(_FIRST_SIZE, os.fstat(descriptor).st_size))

    def begin(self) -> None:
        """Discards what is written."""
        self._end = _LENGTH.size
        _LENGTH.pack_into(self._map, 0, 0)

    def write(self, line: bytes) -> None:
        """Appends one or more whole lines."""
        end = self._end + len(line)
        if end > len(self._map):
            self._map = self._grown(max(end, 2 * len(self._map)))
        self._map[self._end : end] = line
        self._end = end
        _LENGTH.pack_into(self._map, 0, end - _LENGTH.size)

    def _grown(self, size: int) -> mmap.mmap:
        os.ftruncate(self._descriptor, size)  # pages of a memory file are allocated only when they are written
        return mmap.mmap(self._descriptor, size)


def read(descriptor: int) -> bytes:
    """Returns all complete lines of a ledger, to which its rank may be writing."""
    header = os.pread(descriptor, _LENGTH.size, 0)
    if len(header) < _LENGTH.size:  # the rank has not opened it yet
        return b""
    return os.pread(descriptor, _LENGTH.unpack(header)[0], _LENGTH.size)


def clear(descriptor: int) -> None:
    """Discards what is written, while the rank does not write."""
    if os.fstat(descriptor).st_size:
        os.pwrite(descriptor, _LENGTH.pack(0), 0)
