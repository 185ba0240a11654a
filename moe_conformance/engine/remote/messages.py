"""The messages between driver and agents, all of which follow the handshake."""

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
    """The agent's first message: its machine, where its rank would run, and its versions."""

    machine: str
    placement: Placement
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Setup:
    """Requests a fork server with these imports."""

    preload: tuple[str, ...]
    environment: Mapping[str, str]
    path: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Start:
    """Requests a rank, whose channel is a new connection to the driver for `subject`."""

    spec: RankSpec
    subject: bytes


@dataclass(frozen=True)
class Invoke:
    """Requests a call of a method of LocalHost for one rank."""

    method: str
    child: Child
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True)
class Kill:
    """Requests that a rank is killed and discarded; has no reply."""

    pid: int


@dataclass(frozen=True)
class Close:
    """Requests that the fork server and its ranks end; has no reply."""


@dataclass(frozen=True)
class Shutdown:
    """The driver's last message, with the exit status of the run; has no reply."""

    status: int


@dataclass(frozen=True)
class Done:
    """Reply to Setup, Start (with the pid) or Invoke."""

    value: object = None


@dataclass(frozen=True)
class Refused:
    """Reply to a request that failed, with the reason."""

    reason: str


@dataclass(frozen=True)
class Exited:
    """Reports, without a request, that a rank has exited; `code` is negative for a signal."""

    pid: int
    code: int


@dataclass(frozen=True)
class Failed:
    """The agent's last message: why it cannot continue."""

    reason: str


Request = Setup | Start | Invoke | Kill | Close | Shutdown
Reply = Done | Refused | Exited | Failed


def versions() -> dict[str, str]:
    """Returns the versions that must be equal in all processes, so that each can unpickle the others' data."""
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "torch": str(torch.__version__)}


def control(rank: int) -> bytes:
    """Returns the subject of an agent's first connection."""
    return f"agent {rank}".encode().ljust(SUBJECT, b"\0")
