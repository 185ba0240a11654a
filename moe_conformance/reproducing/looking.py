"""A thread of every rank that reports the rank's stack, and sends its result once it is given up as hung."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from moe_conformance.engine import RankResult, stacks
from moe_conformance.engine.blame import Finding
from moe_conformance.reproducing.mailbox import INTERVAL_S, Mailbox
from moe_conformance.reproducing.rank import Rank, leave

DONE = "done"  # the key that rank 0 sets to end the other ranks


def look(rank: Rank, stuck: Callable[[Mailbox], None] | None = None) -> None:
    """Start the thread that reports the stack of this rank.

    Args:
        rank: The rank of this process.
        stuck: On rank 0 only: called once its main thread has been given up; it ends the process.
    """
    threading.Thread(target=_look, args=(rank, stuck), name="says where the rank stands", daemon=True).start()


def _look(rank: Rank, stuck: Callable[[Mailbox], None] | None) -> None:
    mailbox = rank.place.mailbox()
    while True:
        if stuck is None and mailbox.there(DONE):
            leave(0)
        number = rank.number
        if not rank.answered:
            text = stack()
            waits = stacks.waits_in_collective(text)
            mailbox.say(
                f"{number}/stands/{rank.place.rank}", f"{rank.calls()} {stacks.main_frames(text)}" if waits else ""
            )
            why = mailbox.said(f"{number}/given up")
            if why and rank.answer(mailbox, _hung(rank, why, text, waits)) and stuck is not None:
                stuck(mailbox)
        time.sleep(INTERVAL_S)


def _hung(rank: Rank, why: str, text: str, waits: bool) -> Finding:
    error = f"{why}: {stacks.location(text)}"
    return Finding(RankResult(rank.place.rank, "hung", error=error, traceback=text), waits=waits)


def stack() -> str:
    """Return the stacks of all other threads in the format of faulthandler, with the main thread as the current one."""
    main = threading.main_thread().ident
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    titles = {ident: "Current thread" if ident == main else "Thread" for ident in frames}
    blocks = ([f"{titles[ident]} {ident} (most recent call first):", *_lines(frames[ident])] for ident in frames)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _lines(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        frame = frame.f_back
