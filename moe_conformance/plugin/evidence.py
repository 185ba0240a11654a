"""What helps to find the cause of a failed run: tracebacks, printed output, and the ledgers of its ranks."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

import moe_conformance
from moe_conformance.engine.ledger.table import table
from moe_conformance.judging.verdict import Mismatch, RunFailed
from moe_conformance.scenarios.outcome import Outcome, RankOutcome

_LINES = 2 * 6 + 4  # of a traceback: frames, and what is around them
_FRAMES = 6  # of a library
_PRINTED_LINES = 5

_FRAME = re.compile(r'  File "(.+?)", line \d+, in ')
_SUITE = str(Path(moe_conformance.__file__).parent)
_BACKENDS = f"{_SUITE}/backends/"
_OTHERS = (f"{Path(torch.__file__).parent}/", f"{sysconfig.get_path('stdlib')}/", "<")  # `<string>`, `<frozen ...>`
_PACKAGES = ("/site-packages/", "/dist-packages/")  # which are in the folder of the standard library
# A warning of torch on stderr: of C++ or its logger, "[W1129 10:08:54.1 file.cpp:12] Warning: ...", or of Python.
_WARNING = re.compile(r"(\[rank\d+\]:)?\[?[WI]\d{4} |.*/torch/.*: \w*Warning: ")


def evidence(mismatch: Mismatch, outcome: Outcome | None) -> Iterator[str]:
    """Yield lines; a mismatch of values has none unless the ledgers of its ranks disagree."""
    if outcome is None:
        return
    if isinstance(mismatch, RunFailed):
        rank = next((rank for rank in outcome.blamed if rank.traceback), None)
        if rank is not None:
            yield from _end_of(own_frames(rank.traceback or ""), f"on rank {rank.rank}:", _LINES)
        for rank in outcome.blamed:
            yield from _printed(rank)
    if outcome.disagreements:
        yield "the collectives of the ranks, from the first call that differs:"
        ledgers = {rank.rank: rank.ledger for rank in outcome.ranks}
        yield from (f"  {line}" for line in table(ledgers, outcome.disagreements[0]).splitlines())


def own_frames(traceback: str) -> list[str]:
    """Return the lines of a traceback without the frames of torch, of Python and of this suite.

    The last frame is kept, whosever it is; the stacks of a rank that hung are, since they have another form.
    """
    if not traceback.startswith("Traceback"):
        return traceback.rstrip().splitlines()
    parts: list[list[str]] = [[]]
    for line in traceback.rstrip().splitlines():
        starts = _FRAME.match(line) or not line.startswith(" ")
        if starts:
            parts.append([])
        if line.strip(" ~^"):  # which mark a part of the line above
            parts[-1].append(line)
    frames = [number for number, part in enumerate(parts) if part and _FRAME.match(part[0])]
    kept = [number for number in frames if not _is_foreign(parts[number][0])][-_FRAMES:] or frames[-1:]
    kept += frames[-1:]
    shown = [part for number, part in enumerate(parts) if number in kept or number not in frames]
    return [line for part in shown for line in part]


def _is_foreign(line: str) -> bool:
    found = _FRAME.match(line)
    assert found is not None
    path = found[1]
    if path.startswith(_SUITE):
        return not path.startswith(_BACKENDS)
    package = any(each in path for each in _PACKAGES)
    return path.startswith(_OTHERS[0]) or (not package and path.startswith(_OTHERS[1:]))


def _printed(rank: RankOutcome) -> Iterator[str]:
    """Yield the end of what a rank printed, without the warnings of torch."""
    lines: list[str] = []
    follows = False  # the line of source below a warning of Python
    for line in (rank.output or "").strip().splitlines():
        warning = bool(_WARNING.match(line))
        if not warning and not (follows and line.startswith("  ")):
            lines.append(line)
        follows = warning
    if lines:
        yield from _end_of(lines, f"rank {rank.rank} printed:", _PRINTED_LINES)


def _end_of(lines: list[str], title: str, most: int) -> Iterator[str]:
    yield title
    if len(lines) > most:
        yield "  ..."
    yield from (f"  {line}" for line in lines[-most:])
