"""records.jsonl: a line for every record, written as soon as its item ended; what is left of a run that was killed.

A run that comes to its end, or is stopped in order, has all of it in result.json and deletes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from moe_conformance.report.records import Record

NAME = "records.jsonl"


class Journal:
    """The open file of a run."""

    def __init__(self, folder: Path) -> None:
        """Begin anew in that folder."""
        self._path = folder / NAME
        self._file = self._path.open("w", encoding="utf-8")

    def write(self, records: Iterable[Record]) -> None:
        """Append records and hand them to the operating system, so that they outlive this process."""
        for record in records:
            self._file.write(json.dumps(record.to_json(), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """End the file and keep it."""
        self._file.close()

    def delete(self) -> None:
        """End the file and remove it: result.json has what it held."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def read(folder: Path) -> list[Record]:
    """Return the records of a run; the last line may have been cut off.

    Raises:
        OSError: there is no such file.
        ValueError, TypeError: a line is no record.
    """
    lines = (folder / NAME).read_text(encoding="utf-8").split("\n")
    return [Record.from_json(json.loads(line)) for line in lines[:-1]]
