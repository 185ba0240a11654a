"""What driver and agent say to each other, once both have proved themselves."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..hosts import Child, Placement
from ..rank import RankSpec
from .handshake import SUBJECT


@dataclass(frozen=True)
class AgentInfo:
    """The agent's first message: where it is, for people and for ranks, and what it runs."""

    machine: str
    placement: Placement
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Setup:
    """Asks to make ready to fork ranks."""

    preload: tuple[str, ...]
    environment: Mapping[str, str]
    path: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Start:
    """Asks to fork a rank, whose channel is a connection to the driver for the subject `subject`."""

    spec: RankSpec
    subject: bytes


@dataclass(frozen=True)
class Invoke:
    """Asks to do with a rank what the local launcher has a method for."""

    method: str
    child: Child
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True)
class Kill:
    """Tells to kill a rank and to forget it; has no answer."""

    pid: int


@dataclass(frozen=True)
class Close:
    """Tells to end all ranks and what forks them, until another Setup; has no answer."""


@dataclass(frozen=True)
class Shutdown:
    """The driver's last message: the status with which the whole run ends; has no answer."""

    status: int


@dataclass(frozen=True)
class Done:
    """Answers Setup, Start (by the pid) or Ask."""

    value: object = None


@dataclass(frozen=True)
class Refused:
    """The other answer, with the reason."""

    reason: str


@dataclass(frozen=True)
class Exited:
    """Says unasked that a rank has ended; `code` is negative for a signal."""

    pid: int
    code: int


@dataclass(frozen=True)
class Failed:
    """The agent's last message, unasked: it cannot go on, and why."""

    reason: str


Request = Setup | Start | Invoke | Kill | Close | Shutdown
Reply = Done | Refused | Exited | Failed


def versions() -> dict[str, str]:
    """Returns what must be the same in all processes: what one pickles the others load."""
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": str(torch.__version__)}


def control(rank: int) -> bytes:
    """Returns the subject of an agent's first connection."""
    return f"agent {rank}".encode().ljust(SUBJECT, b"\0")
