"""What chapters add to the contract: found at run time, and written down alike for type checkers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from moe_conformance import contract, discovery
from moe_conformance.contract import assembled
from tools import stubs

NAMES, bases = vars(assembled)["__all__"], vars(assembled)["bases"]  # which the stub does not have


class TestStub:
    """The text of assembled.pyi beside what the module has."""

    def test_it_names_what_the_contract_has(self) -> None:
        """The classes and aliases of every surface.py are names of the contract, and the stub has no other names."""
        written = {name for surface in stubs.surfaces(stubs.ROOT) for name in surface.names}
        assert written | {"ClaimsPart", "Sections", "SessionPart"} == set(NAMES)
        assert set() == {name for name in NAMES if not hasattr(contract, name)}

    def test_it_has_the_sections_of_config(self) -> None:
        """Each with its class, and Config has a value of each."""
        written = {name: kind for surface in stubs.surfaces(stubs.ROOT) for name, kind in surface.sections.items()}
        assert written == {each.name: type(each.default).__name__ for each in fields(assembled.Sections)}
        assert written == {name: type(getattr(contract.Config(), name)).__name__ for name in written}

    def test_it_is_python(self) -> None:
        """A type checker can read it."""
        compile(stubs.stub(stubs.ROOT), "assembled.pyi", "exec")
        assert "class Sections:" in stubs.stub(stubs.ROOT)

    def test_sections_are_written_out(self, tmp_path: Path) -> None:
        """A table that is computed cannot be read from the text, and is refused with the name of the file."""
        folder = tmp_path / "moe_conformance" / "chapters" / "made"
        folder.mkdir(parents=True)
        (folder / "surface.py").write_text("SECTIONS = dict(made=Made)\n")
        with pytest.raises(TypeError, match=r"made/surface.py: SECTIONS is a dictionary, written out"):
            stubs.stub(tmp_path)


def module(name: str, **attributes: object) -> ModuleType:
    """Return a module with these attributes."""
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


class TestDiscovery:
    def test_a_surface_may_be_imported_first(self) -> None:
        """Whatever is imported first, the contract has the names of all chapters."""
        code = "import moe_conformance.chapters.routing.surface as s, moe_conformance.contract as c"
        code += "; print(s.Replay is c.Replay)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert "True" == done.stdout.strip()

    def test_two_chapters_with_one_key_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message names the table and the key."""
        two = [module("one", TABLE={"a": 1}), module("two", TABLE={"b": 2, "a": 3})]
        monkeypatch.setattr(discovery, "modules", lambda part: iter(two))
        with pytest.raises(ValueError, match=r"two.TABLE has a, which another chapter has too"):
            discovery.registered("any", "TABLE")

    def test_two_chapters_with_one_claim_are_refused(self) -> None:
        """One would hide the other."""
        parts = [type("ClaimsPart", (), {"__annotations__": {"wire": "str"}, "wire": "no"}) for _ in range(2)]
        two = tuple(module(name, ClaimsPart=part) for name, part in zip(("one", "two"), parts, strict=True))
        with pytest.raises(ImportError, match="ClaimsPart of two and of one both define wire"):
            bases("ClaimsPart", two)
