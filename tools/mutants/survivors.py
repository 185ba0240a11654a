"""Mutants that no test can notice, each with the reason; survivors.toml beside this file, written by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path

from tools.mutants.changes import Mutant

Key = tuple[str, str, str, str]
FILE = Path("tools") / "mutants" / "survivors.toml"
_FIELDS = ("file", "function", "before", "after")


def known(root: Path) -> dict[Key, str]:
    """Return the reason of every survivor that is known, by the key of the mutant.

    Raises:
        ValueError: an entry lacks a field, or another one stands for the same mutant.
    """
    reasons: dict[Key, str] = {}
    for entry in tomllib.loads((root / FILE).read_text()).get("survivor", []):
        if set(entry) != {*_FIELDS, "reason"} or not entry["reason"].strip():
            raise ValueError(f"{FILE}: an entry has {sorted(entry)}, but needs {', '.join(_FIELDS)} and a reason")
        file, function, before, after = (entry[field] for field in _FIELDS)
        if (file, function, before, after) in reasons:
            raise ValueError(f"{FILE}: twice: {file}: {before}  ->  {after}")
        reasons[file, function, before, after] = entry["reason"].strip()
    return reasons


def stale(reasons: Iterable[Key], mutants: Iterable[Mutant]) -> list[Key]:
    """Return the entries that stand for none of these mutants, as after a change of the line."""
    made = {mutant.key for mutant in mutants}
    return [key for key in reasons if key not in made]


def entry(mutant: Mutant) -> str:
    """Return the entry of a survivor, to be filled in."""
    lines = [f"{name} = {_quoted(value)}" for name, value in zip(_FIELDS, mutant.key, strict=True)]
    return "\n".join(["[[survivor]]", *lines, 'reason = ""'])


def _quoted(value: str) -> str:
    if "'" not in value:
        return f"'{value}'"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
