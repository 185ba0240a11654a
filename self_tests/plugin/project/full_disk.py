"""A pytest plug-in that lets the disk be full from the second report on, which is the last one of a run."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_conformance.report import result

_write = result.write


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write the first report only."""
    if content["finished"] is None:
        return _write(folder, content)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


result.write = write
