"""Captures what a rank prints, through a pipe that is always drained and of which only the end is kept."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections import deque

_KEPT_BYTES = 1 << 16
_FORWARDED_BYTES = 1 << 16  # of one rank, during its life
_AT_ONCE = 1 << 12  # what a writable pipe accepts without blocking


_WARNING = re.compile(rb"^[^\s:][^\n:]*:\d+: \w*Warning: [^\n]*\n(?:  [^\n]*\n)?", re.MULTILINE)


class RankOutput:
    """The latest output of one rank, kept in the fork server, which prints the first 64 KiB of it too.

    A Python warning that a rank has printed before, in any run, is not printed again.

    Raises:
        OSError: on construction, if there are no descriptors left.
    """

    def __init__(self, warned: set[bytes]) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._pieces: deque[tuple[float, bytes]] = deque()  # when a piece was read, and the piece
        self._size = 0
        self._forwarded = 0
        self._warned = warned  # of all ranks
        self.watched = False  # whether the fork server's selector has it

    def fileno(self) -> int:
        """Returns the descriptor that is readable when the rank has printed."""
        return self._reader

    def redirect_stdout(self) -> None:
        """In the rank, makes the pipe its standard output and standard error."""
        os.dup2(self._writer, 1)
        os.dup2(self._writer, 2)
        self.close()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)  # a rank may be killed before it flushes

    def drain(self) -> bool:
        """Reads what is there, at most as much as a pipe holds; returns False at the end of the stream."""
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
        """Closes the fork server's copy of the end to which the rank writes."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def close(self) -> None:
        """Closes the ends that are open."""
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
        """Prints output of the rank, unless it is much or the reader is slow: this must not block."""
        if self._forwarded >= _FORWARDED_BYTES:
            return
        piece = _WARNING.sub(self._if_new, piece)
        self._forwarded += len(piece)
        if self._forwarded >= _FORWARDED_BYTES:
            piece += b"\n(the output of this rank beyond 64 KiB is not shown)\n"
        with contextlib.suppress(OSError):  # the reader has closed it
            if select.select([], [1], [], 0)[1]:
                os.write(1, piece)

    def _if_new(self, warning: re.Match[bytes]) -> bytes:
        """Returns a warning that no rank has printed before; "" for one that was printed."""
        if warning[0] in self._warned:
            return b""
        self._warned.add(warning[0])
        return warning[0]
