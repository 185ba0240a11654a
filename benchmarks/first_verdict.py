"""How long a user of the product waits for the first verdict, with files in the page cache or not."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import stop_at_first_verdict as plugin
from benchmarks.contenders.start import ContenderError, call

_COMMAND = (
    *(sys.executable, "-m", "moe_conformance.cli", "run", "--backend", "native", "--ranks", "4", "--profile", "quick"),
    *("--", "-p", plugin.__name__),
)


def seconds() -> float:
    """Returns the seconds from the start of `moe-conformance run`, which is pytest, to the first verdict.

    Raises:
        ContenderError: there was none.
    """
    with tempfile.TemporaryDirectory(prefix="first-verdict-") as folder:
        path = Path(folder) / "time"
        began = time.monotonic()
        _, output = call(_COMMAND, {plugin.VARIABLE: str(path)}, limit_s=120)
        if not path.exists():
            raise ContenderError(f"the product checked nothing\n{output}")
        return float(path.read_text()) - began


def forget_files() -> None:
    """Asks the kernel to drop the installed packages and the standard library from the page cache.

    Linux keeps what another process has mapped just now: a machine on which nothing else runs Python is colder.
    """
    for path in _installed():
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:  # a dangling link
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _installed() -> Iterator[Path]:
    folders = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            yield from (Path(parent) / name for name in names)
