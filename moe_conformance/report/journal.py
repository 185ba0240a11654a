"""records.jsonl: a line for every record, written when its item ended; a run that was killed leaves it behind.

A run that ends, or is stopped in order, writes all records to result.json and deletes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from moe_conformance import reading
from moe_conformance.report.records import Record

NAME = "records.jsonl"


class Journal:
    """The open file of a run."""

    def __init__(self, folder: Path) -> None:
        """Open the file in a folder; an old one is overwritten."""
        self._path = folder / NAME
        self._file = self._path.open("wb", buffering=0)  # after a full disk nothing is left to be written at the end

    def write(self, records: Iterable[Record]) -> None:
        """Append records, so that they are kept if this process is killed.

        Raises:
            OSError: they cannot be written.
        """
        lines = "".join(json.dumps(record.to_json(), allow_nan=False) + "\n" for record in records).encode()
        while lines:
            lines = lines[self._file.write(lines) :]

    def close(self) -> None:
        """Close the file and keep it."""
        self._file.close()

    def delete(self) -> None:
        """Close the file and delete it: result.json has its records."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def read(folder: Path) -> list[Record]:
    """Return the records of a run; the last line may have been cut off.

    Raises:
        ValueError: there is no such file, or a line is no record.
    """
    lines = reading.text_of(folder / NAME).split("\n")
    return [Record.from_json(reading.json_from(line)) for line in lines[:-1]]
