"""Registers the surfaces of native's files: the session finds classes and functions that offer one.

A surface that is built of a configuration alone is a class, `Offered`; any other is built by a function under
`@offers("its method of Session")`. Both say which options of Config they map beside those of every surface.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from moe_conformance.contract import Config

if TYPE_CHECKING:
    from moe_conformance.backends.native.session import NativeSession

# The options that some surface maps: one config serves all surfaces.
MAPPED = (
    *("variant", "experts", "top_k", "hidden", "ffn", "dtype", "weights_applied", "routing", "capacity"),
    *("padding.tokens", "padding.alignment", "padding.bound", "padding.packed", "padding.splits"),
)
OF_EXPERTS = ("activation", "expert_biases", "sharding")  # an exchange knows nothing of them
OF_ROUTERS = ("router_dtype", "jitter")  # of routers alone and in layers

Build = TypeVar("Build", bound=Callable[..., Any])


@dataclass(frozen=True)
class Offer:
    """A surface: the method of `contract.Session` that returns it, its builder, and the options that it maps."""

    surface: str
    build: Callable[[NativeSession, Config], Any]
    maps: tuple[str, ...] | None  # None: whatever the surfaces map of which it is made, which refuse the rest


class Offered:
    """A surface without process groups, built from a configuration only.

    `surface` is the method of `contract.Session` that returns it; `maps` names the options and sections of Config that
    it reads beside those of every surface.
    """

    surface: ClassVar[str]
    maps: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config) -> None:
        """Read the configuration."""


def offers(surface: str, maps: tuple[str, ...] | None = ()) -> Callable[[Build], Build]:
    """Return a decorator that registers a function as the builder of a surface."""

    def mark(build: Build) -> Build:
        build.offer = Offer(surface, build, maps)  # type: ignore[attr-defined]
        return build

    return mark


def offered() -> Iterator[Offer]:
    """Yield the offers of native's files, file by file.

    Raises:
        ValueError: two of them offer the same surface.
    """
    seen: dict[str, str] = {}
    package = __package__ or ""
    for found in pkgutil.walk_packages([str(Path(__file__).parent)], f"{package}."):
        if found.name == f"{package}.session":  # it is what asks
            continue
        for name, value in vars(importlib.import_module(found.name)).items():
            if getattr(value, "__module__", None) != found.name:
                continue
            offer = _offer_of(value)
            if offer is None:
                continue
            if offer.surface in seen:
                raise ValueError(f"{name} and {seen[offer.surface]} both offer {offer.surface!r}")
            seen[offer.surface] = name
            yield offer


def _offer_of(value: Any) -> Offer | None:
    if inspect.isclass(value) and issubclass(value, Offered) and "surface" in vars(value):
        return Offer(value.surface, lambda session, config: session.use(value)(config), value.maps)
    offer = getattr(value, "offer", None)
    return offer if isinstance(offer, Offer) else None
