"""records.jsonl: a line for every item, written as soon as it ended; what is left of a run that was killed."""

from __future__ import annotations

import json
from pathlib import Path

from moe_conformance.report.records import Record

NAME = "records.jsonl"


class Journal:
    """The open file of a run."""

    def __init__(self, folder: Path) -> None:
        """Begin anew in that folder."""
        self._file = (folder / NAME).open("w", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append a record and hand it to the operating system, so that it outlives this process."""
        self._file.write(json.dumps(record.to_json(), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()


def read(folder: Path) -> list[Record]:
    """Return the records of a run; the last line may have been cut off.

    Raises:
        OSError: there is no such file.
        ValueError: a line is no record.
    """
    lines = (folder / NAME).read_text(encoding="utf-8").split("\n")
    return [Record.from_json(json.loads(line)) for line in lines[:-1]]
