"""The folder of a report, into which one run writes at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class InUse(Exception):
    """Another run writes into the folder; one sentence with the remedy."""


class Hold:
    """Keeps other runs out of a folder as long as this object is there; no file is left behind."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder.

        Raises:
            InUse: it is locked by another process, or by another object of this one.
        """
        self._descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise InUse(f"another run writes into {folder}; wait for its end, or give another --report") from None
        except OSError:  # a file system without locks
            pass

    def release(self) -> None:
        """Let others in."""
        os.close(self._descriptor)
