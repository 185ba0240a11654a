"""The files to which a rank writes what is read after its death, or while it does not answer."""

from __future__ import annotations

import os
import tempfile
import time
from typing import IO

from .ledger import ledger_file


class RankFiles:
    """The stacks that a rank dumps, and its ledger; both have no name and go with the last who has them open.

    Attributes:
        begun: The time of the latest `begin`.
    """

    def __init__(self) -> None:
        self._stacks = tempfile.TemporaryFile(prefix="stacks-")  # noqa: SIM115 - until close()
        self._ledger = _memory_file("ledger")
        self._first = 0  # byte of the stacks since `begin`
        self._read = 0
        self.begun = 0.0

    @property
    def descriptors(self) -> tuple[int, int]:
        """Those of the stacks and of the ledger."""
        return self._stacks.fileno(), self._ledger.fileno()

    def begin(self) -> None:
        """Leaves behind what was written before the job that is about to be sent."""
        self.begun = time.monotonic()
        self._first = self._read = self.stacks_size()
        ledger_file.clear(self._ledger.fileno())

    def stacks_size(self) -> int:
        """Bytes dumped so far."""
        return os.fstat(self._stacks.fileno()).st_size

    def skip_stacks(self) -> None:
        """Leaves out of later `new_stacks` what is dumped already."""
        self._read = self.stacks_size()

    def new_stacks(self) -> str:
        """Returns what was dumped since `skip_stacks`."""
        return self._stacks_from(self._read)

    def all_stacks(self) -> str:
        """Returns what was dumped since `begin`: that of a crash may have come before others were asked for."""
        return self._stacks_from(self._first)

    def ledger(self) -> bytes:
        """Returns what the rank wrote into its ledger since `begin`."""
        return ledger_file.read(self._ledger.fileno())

    def _stacks_from(self, start: int) -> str:
        # Never by the file's own position: the rank writes at it.
        return os.pread(self._stacks.fileno(), self.stacks_size() - start, start).decode(errors="replace")

    def close(self) -> None:
        """Lets go of both."""
        self._stacks.close()
        self._ledger.close()


def _memory_file(name: str) -> IO[bytes]:
    """Opens a file that is never on a disk, where the system has such: a write then costs a fraction."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile(prefix=f"{name}-")
