"""Put modules under the names that a library imports, while one of its modules is loaded."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def module(name: str, **attributes: Any) -> ModuleType:
    """Return a module of that name with these attributes; a dotted name in them is no concern of it."""
    made = ModuleType(name)
    made.__dict__.update(attributes)
    return made


class Namespace(ModuleType):
    """A module with some of its names replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        """Take the module, and what stands under some names instead."""
        super().__init__(module.__name__)
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        """Return what the module has under any other name."""
        return getattr(self._module, name)


@contextmanager
def presented(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Let imports find these modules; None: let them find nothing. What was there before is put back."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)  # type: ignore[arg-type]  # an entry None makes its import fail
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def loaded_with(original: ModuleType, modules: Mapping[str, ModuleType | None]) -> ModuleType:
    """Return a second instance of a library's module, executed while imports find these modules.

    The first instance, and `sys.modules`, are as they were.
    """
    spec = importlib.util.find_spec(original.__name__)
    assert spec is not None
    assert spec.loader is not None
    second = importlib.util.module_from_spec(spec)
    with presented(modules):
        spec.loader.exec_module(second)
    return second
