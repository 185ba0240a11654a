"""Surfaces that native builds of a configuration alone. A new one is a file of its own: the session finds it here."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from moe_conformance.contract import Config


class Offered:
    """A surface without process groups.

    `surface` is the method of `contract.Session` that returns it; `maps` names the options and sections of Config that
    it reads beside those of every surface.
    """

    surface: ClassVar[str]
    maps: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config) -> None:
        """Read what it needs of the configuration."""


def offered() -> Iterator[type[Offered]]:
    """Yield every class of native that names its surface, file by file.

    Raises:
        ValueError: two of them name the same surface.
    """
    package = __package__ or ""
    seen: dict[str, type[Offered]] = {}
    for found in pkgutil.walk_packages([str(Path(__file__).parent)], f"{package}."):
        if found.name == f"{package}.session":  # it is what asks
            continue
        module = importlib.import_module(found.name)
        classes = (each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == found.name)
        for each in classes:
            if not issubclass(each, Offered) or "surface" not in vars(each):
                continue
            if each.surface in seen:
                raise ValueError(f"{each.__name__} and {seen[each.surface].__name__} both offer {each.surface!r}")
            seen[each.surface] = each
            yield each
