"""The files that a rank writes and the driver reads while the rank is blocked, or after it has exited."""

from __future__ import annotations

import os
import tempfile
import time
from typing import IO

from .ledger import ledger_file


class RankFiles:
    """A rank's stack file and ledger file; both are unnamed and vanish when nobody has them open.

    Attributes:
        begun: When `begin` was last called, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self._stacks = tempfile.TemporaryFile(prefix="stacks-")  # noqa: SIM115 - until close()
        self._ledger = _memory_file("ledger")
        self._first = 0  # offset of the first stack since `begin`
        self._read = 0
        self.begun = 0.0

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors of the stack file and of the ledger file."""
        return self._stacks.fileno(), self._ledger.fileno()

    def begin(self) -> None:
        """Discards what was written so far; called before a job is sent."""
        self.begun = time.monotonic()
        self._first = self._read = self.stacks_size()
        ledger_file.clear(self._ledger.fileno())

    def stacks_size(self) -> int:
        """Returns how many bytes of stacks were dumped."""
        return os.fstat(self._stacks.fileno()).st_size

    def skip_stacks(self) -> None:
        """Excludes the stacks that were dumped so far from later calls of `new_stacks`."""
        self._read = self.stacks_size()

    def new_stacks(self) -> str:
        """Returns the stacks that were dumped since `skip_stacks`."""
        return self._stacks_from(self._read)

    def all_stacks(self) -> str:
        """Returns the stacks that were dumped since `begin`, those before `skip_stacks` included."""
        return self._stacks_from(self._first)

    def ledger(self) -> bytes:
        """Returns what the rank has written into its ledger since `begin`."""
        return ledger_file.read(self._ledger.fileno())

    def _stacks_from(self, start: int) -> str:
        # By pread, which leaves the file's position alone: the rank writes there.
        return os.pread(self._stacks.fileno(), self.stacks_size() - start, start).decode(errors="replace")

    def close(self) -> None:
        """Closes both files."""
        self._stacks.close()
        self._ledger.close()


def _memory_file(name: str) -> IO[bytes]:
    """Opens an unnamed file, in memory where the system supports it: writing there is much faster."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile(prefix=f"{name}-")
