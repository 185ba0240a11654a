"""What a rank is doing: stacks dumped by faulthandler, and whether they stand in a collective."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')

# Our own, between a call of torch.distributed and torch; they are left out of every stack that is read here.
_LEDGER_FILES = f"{__package__.replace('.', '/')}/ledger/"
# A frame of torch that only hands the call on says nothing of what is waited for.
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
    """Returns the frames of the thread that runs the function, innermost first.

    It is the thread that took the signal; else the last of the dump, which is the process's first.
    """
    blocks = [block for block in re.split(r"\n\s*\n", text) if "most recent call first" in block]
    current = [block for block in blocks if "Current thread" in block]
    return _frames((current or blocks or [""])[-1])


def waits_in_collective(text: str) -> bool:
    """Tells whether a rank's main thread stands in a collective, or in a backward pass that does."""
    main = main_frames(text)
    if _waits(main):
        return True
    if not main or main[0].function != "_engine_run_backward":
        return False
    return any(_waits(_frames(block)) for block in re.split(r"\n\s*\n", text))


def location(text: str) -> str:
    """Says where a rank stands: its innermost call, and the frame outside of torch that led to it."""
    frames = main_frames(text)
    if not frames:
        return "it dumped no stack"
    outside = next((f for f in frames if "/torch/" not in f.file and not _only_forwards(f)), frames[-1])
    return f"in {frames[0].function}, from {outside.file}:{outside.line}"


def innermost(text: str) -> str:
    """Returns where a rank stands, outside of torch where it can be told: `FILE:LINE (FUNCTION)`."""
    frames = main_frames(text)
    if not frames:
        return "no known place: it dumped no stack"
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
