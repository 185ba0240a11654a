"""The recipes of the goldens, a file each; those of a chapter bear its name, or begin with it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from moe_conformance.goldens.chapter import Chapter


def chapters() -> Mapping[str, Chapter]:
    """Return the recipe of every file of this folder that has one, by the name of the file and of its golden."""
    names = sorted(each.name for each in pkgutil.iter_modules(__path__))
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return {name: module.CHAPTER for name, module in modules.items() if hasattr(module, "CHAPTER")}
