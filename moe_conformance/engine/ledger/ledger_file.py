"""The file that a rank's ledger is in: mapped on the rank, so that a line is written without a system call.

What is written there is in the kernel's hands and outlives the rank. The first eight bytes say how
many bytes of lines follow; they are written after the lines, so that whoever reads finds whole ones, whenever the rank
was killed.
"""

from __future__ import annotations

import mmap
import os
import struct

_LENGTH = struct.Struct("<Q")
_FIRST_SIZE = 1 << 18


class LedgerFile:
    """The rank's side; one thread at a time may write.

    Args:
        descriptor: Of the file, which is empty or another LedgerFile's of the same rank.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._end = _LENGTH.size
        self._map = self._grown(max(_FIRST_SIZE, os.fstat(descriptor).st_size))

    def begin(self) -> None:
        """Forgets what is written."""
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
        os.ftruncate(self._descriptor, size)  # a file in memory takes none before it is written to
        return mmap.mmap(self._descriptor, size)


def read(descriptor: int) -> bytes:
    """Returns all lines of a ledger, which its rank may be writing to."""
    header = os.pread(descriptor, _LENGTH.size, 0)
    if len(header) < _LENGTH.size:  # the rank has yet to open it
        return b""
    return os.pread(descriptor, _LENGTH.unpack(header)[0], _LENGTH.size)


def clear(descriptor: int) -> None:
    """Forgets what is written, while the rank writes nothing."""
    if os.fstat(descriptor).st_size:
        os.pwrite(descriptor, _LENGTH.pack(0), 0)
