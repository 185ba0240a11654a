"""When the driver looks for garbage: not while it collects items, and then only among what came after them.

Python looks at all objects whenever their number has grown by a quarter, and items, cases and imported modules are a
million that stay.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_once() -> Iterator[None]:
    """Look for no garbage in here, and never again at what is left of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
