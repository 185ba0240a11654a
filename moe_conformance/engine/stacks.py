"""Parses the stacks that faulthandler dumps, and recognises those that wait in a collective."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')

# Frames of the ledger, between a call of torch.distributed and torch; they are dropped from every stack.
_LEDGER_FILES = f"{__package__.replace('.', '/')}/ledger/"
# Frames of these files only forward a call, and do not show what is waited for.
_FORWARDING_FILES = (
    "torch/_ops.py",
    "torch/_library/",
    "torch/utils/_contextlib.py",
    "contextlib.py",
    "typing_extensions.py",
)
# Calls that wait for a collective without a frame of torch.distributed: Work.wait and the operators are C++.
_WAITING_LINE = re.compile(r"\.wait\(|wait_tensor|c10d")


@dataclass(frozen=True)
class Frame:
    """One frame of a dumped stack."""

    file: str
    line: int
    function: str


def main_frames(text: str) -> list[Frame]:
    """Returns the frames of the thread that runs the job's function, innermost first.

    It is the thread that handled the signal; else the last of the dump, which is the process's main thread.
    """
    blocks = [block for block in re.split(r"\n\s*\n", text) if "most recent call first" in block]
    current = [block for block in blocks if "Current thread" in block]
    return _frames((current or blocks or [""])[-1])


def waits_in_collective(text: str) -> bool:
    """Returns True if the main thread waits in a collective, or in a backward pass that does."""
    main = main_frames(text)
    if _waits(main):
        return True
    if not main or main[0].function != "_engine_run_backward":
        return False
    return any(_waits(_frames(block)) for block in re.split(r"\n\s*\n", text))


def location(text: str) -> str:
    """Describes where a rank is: its innermost call, and the innermost frame outside of torch."""
    frames = main_frames(text)
    if not frames:
        return "it dumped no stack"
    outside = next((f for f in frames if "/torch/" not in f.file and not _only_forwards(f)), frames[-1])
    return f"in {frames[0].function}, from {outside.file}:{outside.line}"


def innermost(text: str) -> str:
    """Returns the innermost frame outside of torch, else the innermost: `FILE:LINE (FUNCTION)`."""
    frames = main_frames(text)
    if not frames:
        return "an unknown line: it dumped no stack"
    frame = next((f for f in frames if "/torch/" not in f.file and not _only_forwards(f)), frames[0])
    return f"{frame.file}:{frame.line} ({frame.function})"


def _frames(block: str) -> list[Frame]:
    frames = (Frame(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(block))
    return [frame for frame in frames if _LEDGER_FILES not in frame.file]


def _only_forwards(frame: Frame) -> bool:
    return any(part in frame.file for part in _FORWARDING_FILES)


def _waits(frames: list[Frame]) -> bool:
    telling = next((f for f in frames if not _only_forwards(f)), None)
    if telling is None:
        return False
    if "torch/distributed/" in telling.file:
        return True
    return _WAITING_LINE.search(linecache.getline(telling.file, telling.line)) is not None
