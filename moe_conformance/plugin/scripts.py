"""Writes the first failure of each kind as a script into the report folder; it runs without pytest."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from moe_conformance import spec
from moe_conformance.contract.topology import named
from moe_conformance.plugin.run import Run
from moe_conformance.report import words
from moe_conformance.report.records import Record
from moe_conformance.reproducing import checks
from moe_conformance.workloads.plan import VIRTUAL

FOLDER = "reproduce"
MOST = 20  # scripts of a run
_VERDICTS = ("fail", "crash", "hang", "unstable", "vacuous")  # of the backend; the others are of the suite or a machine
_WIDE = 108


class Scripts:
    """The scripts of one run."""

    def __init__(self, run: Run) -> None:
        """Write nothing yet."""
        self._run = run
        self.written: dict[tuple[str, ...], Path] = {}  # by kind of failure, see `words.kind`

    def write(self, record: Record) -> Path | None:
        """Write a script for an item that failed; None if its kind has one, or none is possible.

        None is possible without a case, as for drawn batches and groups, and with virtual ranks.
        """
        folder, kind = self._run.options.report, words.kind(record)
        if not folder or record.verdict not in _VERDICTS or kind in self.written or len(self.written) == MOST:
            return None
        if self._run.options.profile == VIRTUAL or record.workload is None or not checks.can_call(check_of(record)):
            return None
        path = self._path(Path(folder) / FOLDER, record)
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(self._lines(record, path)) + "\n", encoding="utf-8", errors="backslashreplace")
        self.written[kind] = path
        return path

    def _path(self, folder: Path, record: Record) -> Path:
        """Return a path that this run has not written yet."""
        name = re.sub(r"[^\w.+-]", "_", f"{record.requirements[0]}-{record.case}")
        taken = {path.stem for path in self.written.values()}
        names = (name, *(f"{name}-{number}" for number in range(2, MOST + 1)))
        return folder / f"{next(candidate for candidate in names if candidate not in taken)}.py"

    def _lines(self, record: Record, path: Path) -> Iterator[str]:
        options, requirement = self._run.options, record.requirements[0]
        layout = named(record.layout or "")
        yield f"# {requirement}: {_short(spec.load()[requirement].sentence)}"
        yield f"# {record.verdict}: {_short(record.message)}"
        yield f"# python {shlex.quote(path.name)}"
        yield f"# torchrun --nproc-per-node {layout.world} {shlex.quote(path.name)}  # each process is a rank"
        yield f"# {record.reproduce(options.again)}  # under pytest"
        yield "# Exit status: 1 if the check fails, 0 if it passes, 2 if it cannot run here."
        yield "import sys"
        yield ""
        yield "from moe_conformance.reproducing import reproduce"
        yield ""
        yield f"sys.path.append({os.getcwd()!r})  # where the run was started: the adapter is found from there"
        if options.library:
            yield f"sys.path.insert(0, {str(Path(options.library).resolve())!r})  # the checkout of the library"
        yield "reproduce("
        values: dict[str, object] = {
            "backend": self._run.target,
            "requirement": requirement,
            "check": check_of(record),
            "variant": record.variant,
            "layout": record.layout,
            "workload": record.workload,
            "ranks": layout.world,
            "device": options.device,
            "profile": options.profile,
        }
        if options.asynchrony != "plain":
            values["asynchrony"] = options.asynchrony
        if record.verdict == "hang":
            values["deadline_s"] = options.deadline
        yield from (f"    {name}={value!r}," for name, value in values.items())
        yield ")"


def check_of(record: Record) -> str:
    """Return the check of a record as scripts name it: `test_file:TestClass.test_name`."""
    file, *classes, _ = record.node.split("[")[0].split("::")
    return f"{Path(file).stem}:{'.'.join([*classes, record.check])}"


def _short(text: str) -> str:
    """Return the first line of a text, cut so that it fits into a comment."""
    line = "".join(character if character.isprintable() else " " for character in text.partition("\n")[0])
    return line if len(line) <= _WIDE else line[: _WIDE - 3] + "..."
