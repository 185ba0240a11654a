"""Every chapter has one name in all rooms, and every file in them belongs to a chapter (docs/decisions/0010)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_conformance import spec

ROOT = Path(__file__).parents[2]
CHAPTERS = {each.chapter for each in spec.load().values()}

# The rooms, with the files and folders in them that belong to no chapter.
ROOMS = {
    "reference": {"rounding"},
    "moe_conformance/chapters": set(),
    "distributed_tests": {"properties"},
    "goldens/chapters": set(),
    "self_tests/chapters": set(),
}


def names(room: str) -> Iterator[str]:
    """Yield the first part of every path in a room."""
    for path in (ROOT / room).iterdir():
        if path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py"))):
            name = path.stem.removeprefix("test_")
            if name != "__init__":
                yield name


def chapter_of(name: str) -> str | None:
    """Return the chapter whose name a file or folder bears, or begins with."""
    return next((each for each in CHAPTERS if name == each or name.startswith(f"{each}_")), None)


class TestChapters:
    def test_they_are_told_apart(self) -> None:
        """No chapter's name begins with another's and an underscore."""
        assert [] == [(one, two) for one in CHAPTERS for two in CHAPTERS if one.startswith(f"{two}_")]

    @pytest.mark.parametrize("room", ROOMS)
    def test_every_file_belongs_to_one(self, room: str) -> None:
        """Or stands in the list of those that belong to none, which names nothing that is not there."""
        found = set(names(room))
        assert ROOMS[room] == {name for name in found if chapter_of(name) is None}

    def test_goldens_are_named_after_them(self) -> None:
        """The files of stored values bear the names of chapters too."""
        assert [] == [path.stem for path in (ROOT / "goldens").glob("*.safetensors") if chapter_of(path.stem) is None]
