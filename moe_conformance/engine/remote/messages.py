"""What driver and outpost say to each other, once both have proved themselves."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..host import Child, Place
from ..rank import Station
from .handshake import SUBJECT


@dataclass(frozen=True)
class Presence:
    """The outpost's first message: where it is, for people and for ranks, and what it runs."""

    machine: str
    place: Place
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Opening:
    """Asks to make ready to fork ranks."""

    preload: tuple[str, ...]
    environment: Mapping[str, str]
    path: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Start:
    """Asks to fork a rank, whose channel is a connection to the driver for the subject `ticket`."""

    station: Station
    ticket: bytes


@dataclass(frozen=True)
class Ask:
    """Asks to do with a rank what the local launcher has a method for."""

    method: str
    child: Child
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True)
class Forget:
    """Tells to kill a rank and to forget it; has no answer."""

    pid: int


@dataclass(frozen=True)
class Close:
    """Tells to end all ranks and what forks them, until another Opening; has no answer."""


@dataclass(frozen=True)
class Farewell:
    """The driver's last message: the status with which the whole run ends; has no answer."""

    status: int


@dataclass(frozen=True)
class Done:
    """Answers Opening, Start (by the pid) or Ask."""

    value: object = None


@dataclass(frozen=True)
class Refused:
    """The other answer, with the reason."""

    reason: str


@dataclass(frozen=True)
class Ended:
    """Says unasked that a rank has ended; `code` is negative for a signal."""

    pid: int
    code: int


@dataclass(frozen=True)
class Failed:
    """The outpost's last message, unasked: it cannot go on, and why."""

    reason: str


Request = Opening | Start | Ask | Forget | Close | Farewell
Reply = Done | Refused | Ended | Failed


def versions() -> dict[str, str]:
    """Returns what must be the same in all processes: what one pickles the others load."""
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": str(torch.__version__)}


def control(rank: int) -> bytes:
    """Returns the subject of an outpost's first connection."""
    return f"outpost {rank}".encode().ljust(SUBJECT, b"\0")
