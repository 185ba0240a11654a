"""The oracles that decide each requirement, stored from measurements.

`deciding.toml` has a table for each requirement: the name of an oracle, `exchange.deliveries:deliveries` or, for a row
of a table, `config_rules.rules:RULES[RULE-06]`, and the case on which a change of its result changed the verdict of a
check of the requirement. `python -m tools.deciding_oracles` writes it, and tests repeat a part of it in each run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

FILE = Path(__file__).with_suffix(".toml")
WAITING = Path(__file__).with_name("waiting.toml")

_HEAD = "# By requirement: its oracles, and the case on which each decides. Written by tools/deciding_oracles.py."


def read(file: Path = FILE) -> Mapping[str, Mapping[str, str]]:
    """Return by requirement and oracle the case on which it decides; nothing if there is no file."""
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def waiting(file: Path = WAITING) -> Mapping[str, Sequence[str]]:
    """Return the oracles that no check reaches yet, and the requirements without a check that each decides.

    Tests refuse an oracle that no check reaches and that is not in it, and one in it that a check reaches.
    """
    return tomllib.loads(file.read_text(encoding="utf-8"))


def text(found: Mapping[str, Mapping[str, str]]) -> str:
    """Return the text of the file.

    >>> print(text({"EXCH-01": {"exchange.deliveries:deliveries": "native alltoall ep2 even"}}), end="")
    # By requirement: its oracles, and the case on which each decides. Written by tools/deciding_oracles.py.
    <BLANKLINE>
    [EXCH-01]
    "exchange.deliveries:deliveries" = "native alltoall ep2 even"
    """
    lines = [_HEAD]
    for id in sorted(found):
        lines += ["", f"[{id}]", *(f'"{oracle}" = "{case}"' for oracle, case in sorted(found[id].items()))]
    return "\n".join(lines) + "\n"
