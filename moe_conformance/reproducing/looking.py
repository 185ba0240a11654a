"""The thread of a rank that says where the rank stands, and answers for it once it is given up."""

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

DONE = "done"  # the key under which rank 0 lets the others go


def look(rank: Rank, stuck: Callable[[Mailbox], None] | None = None) -> None:
    """Start the thread.

    Args:
        rank: The rank of this process.
        stuck: On rank 0: called once its own main thread was given up, and ends the process.
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
    """Return the stacks of all threads but this one, as faulthandler has them; the main thread is the current one."""
    main = threading.main_thread().ident
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    titles = {ident: "Current thread" if ident == main else "Thread" for ident in frames}
    blocks = ([f"{titles[ident]} {ident} (most recent call first):", *_lines(frames[ident])] for ident in frames)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _lines(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        frame = frame.f_back
