"""Which refusals are proved: those that the library raised, and not its adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest

from moe_conformance.contract import Unsupported, refusals
from moe_conformance.scenarios.proof import refused_by


class Adapter:
    """An adapter; what is defined in this module is its own."""


class OneFile:
    """An adapter in the file of its library."""

    library_modules: ClassVar[tuple[str, ...]] = (__name__,)


def by_the_library() -> None:
    """Have a library, here the one for JSON, raise in its own frames."""
    json.loads("{")


def by_something_in_c() -> None:
    """Call a kernel that refuses: its innermost Python frame is the caller's."""
    int("sixteen")


def by_the_adapter() -> None:
    """Raise what nobody else did."""
    raise ValueError("the library does not like it")


def by_a_slip() -> None:
    """Ask for what is not there."""
    print(SimpleNamespace().top_k)


def refusal(refuse: Callable[[], None]) -> Unsupported:
    """Return what an adapter makes of it."""
    with pytest.raises(Unsupported) as caught, refusals(Exception, match="."):
        refuse()
    return caught.value


class TestRefusals:
    @pytest.mark.parametrize("refuse", [by_the_library, by_something_in_c])
    def test_the_library_proves_it(self, refuse: Callable[[], None]) -> None:
        """It raised in its own frames, or in what has no Python frames."""
        assert "library" == refused_by(refusal(refuse), Adapter())

    @pytest.mark.parametrize("refuse", [by_the_adapter, by_a_slip])
    def test_an_adapter_proves_nothing(self, refuse: Callable[[], None]) -> None:
        """Whatever it says: an exception of its own is no property of the library, nor is a slip."""
        error = refusal(refuse)
        assert ("library", "adapter") == (error.by, refused_by(error, Adapter()))

    def test_without_a_cause_nothing_is_proved(self) -> None:
        """Nor where the cause was never raised."""
        assert "adapter" == refused_by(Unsupported("no", by="library"), Adapter())
        made = Unsupported("no", by="library")
        made.__cause__ = ValueError("never raised")
        assert "adapter" == refused_by(made, Adapter())

    def test_an_adapter_may_live_in_its_librarys_file(self) -> None:
        """If it says so; what it refuses as an adapter stays its own."""
        assert "library" == refused_by(refusal(by_the_adapter), OneFile())
        assert "adapter" == refused_by(Unsupported("not mapped"), OneFile())
