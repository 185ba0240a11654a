"""What a rank prints: a pipe that is always drained, so that printing without end fills neither it nor a disk."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections import deque

_KEPT_BYTES = 1 << 16
_FORWARDED_BYTES = 1 << 16  # of one rank, in its whole life
_AT_ONCE = 1 << 12  # what a pipe that is writable at all takes without blocking


_WARNING = re.compile(rb"^[^\s:][^\n:]*:\d+: \w*Warning: [^\n]*\n(?:  [^\n]*\n)?", re.MULTILINE)


class RankOutput:
    """The latest output of one rank, in the process that forks it, which passes on the first of it to its own.

    A warning of Python's that another rank has printed before, now or in an earlier run, is not passed on again.

    Raises:
        OSError: on construction, if there are no descriptors left.
    """

    def __init__(self, warned: set[bytes]) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._pieces: deque[tuple[float, bytes]] = deque()  # when it was read, and what
        self._size = 0
        self._forwarded = 0
        self._warned = warned  # of all ranks
        self.watched = False  # by the nursery's selector

    def fileno(self) -> int:
        """The descriptor that is readable when the rank has printed."""
        return self._reader

    def redirect_stdout(self) -> None:
        """In the rank: makes the pipe its standard output and standard error."""
        os.dup2(self._writer, 1)
        os.dup2(self._writer, 2)
        self.close()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)  # a rank may be killed before it flushes

    def drain(self) -> bool:
        """Reads what there is, but no more than a pipe holds; returns False once nothing more can come."""
        for _ in range(_KEPT_BYTES // _AT_ONCE):
            try:
                piece = os.read(self._reader, _AT_ONCE)
            except BlockingIOError:
                return True
            if not piece:
                return False
            self._keep(piece)
            self._forward(piece)
        return True

    def tail(self, since: float = 0.0) -> bytes:
        """Returns the end of what was read since a time of `time.monotonic`."""
        return b"".join(piece for when, piece in self._pieces if when >= since)[-_KEPT_BYTES:]

    def close_writer(self) -> None:
        """In the forking process, once the rank has its own."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def close(self) -> None:
        """Closes what is open."""
        self.close_writer()
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1

    def _keep(self, piece: bytes) -> None:
        self._pieces.append((time.monotonic(), piece))
        self._size += len(piece)
        while self._size - len(self._pieces[0][1]) >= _KEPT_BYTES:
            self._size -= len(self._pieces.popleft()[1])

    def _forward(self, piece: bytes) -> None:
        """Writes to our own standard output, unless that is much or its reader is slow: nothing may block here."""
        if self._forwarded >= _FORWARDED_BYTES:
            return
        piece = _WARNING.sub(self._if_new, piece)
        self._forwarded += len(piece)
        if self._forwarded >= _FORWARDED_BYTES:
            piece += b"\n(this rank prints much; what follows is not shown)\n"
        with contextlib.suppress(OSError):  # nobody reads it any more
            if select.select([], [1], [], 0)[1]:
                os.write(1, piece)

    def _if_new(self, warning: re.Match[bytes]) -> bytes:
        """Return a warning that is new, and nothing in place of one that is known."""
        if warning[0] in self._warned:
            return b""
        self._warned.add(warning[0])
        return warning[0]
