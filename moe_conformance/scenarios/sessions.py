"""Open and reuse the session of a backend on a rank, build its surfaces, and record the warnings of a build.

A session is reused until another backend, layout or mode of torch is needed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_conformance.backends.registry import load
from moe_conformance.contract import Backend, Config, Session, Unsupported
from moe_conformance.contract.topology import Layout, Topology
from moe_conformance.engine import RankContext

_SESSION = "moe_conformance.session"
_BACKENDS = "moe_conformance.backends"


@dataclass(frozen=True)
class Opened:
    """An open session, with the backend, topology and key for which it was opened."""

    key: tuple[Any, ...]
    backend: Backend
    session: Session
    topology: Topology


def build(session: Session, surface: str, config: Config) -> Any:
    """Build a surface of a session by the name of its method.

    Raises:
        Unsupported: the backend does not offer it, or not with this config.
    """
    method = getattr(session, surface, None)
    if method is None:
        raise Unsupported(f"this backend offers no {surface.replace('_', ' ')}")
    return method(config)


def closed(context: RankContext) -> None:
    """Close the open session of this rank, if there is one."""
    kept: Opened | None = context.kept.pop(_SESSION, None)
    if kept is not None:
        kept.session.close()


def opened(context: RankContext, name: str, layout: Layout) -> Opened:
    """Return the session of a backend on a layout; a session that is open for anything else is closed first.

    One backend object opens all sessions of a process, as in a trainer: state that it keeps from one layout shows on
    the next.
    """
    key = (name, layout, str(context.device), torch.are_deterministic_algorithms_enabled())  # a backend may choose it
    kept: Opened | None = context.kept.get(_SESSION)
    if kept is not None and kept.key == key:
        return kept
    closed(context)
    backends: dict[str, Backend] = context.kept.setdefault(_BACKENDS, {})
    if name not in backends:
        backends[name] = load(name)
    backend = backends[name]
    topology = Topology(layout, context.rank, context.groups)
    kept = Opened(key, backend, backend.open(topology, context.device), topology)
    context.kept[_SESSION] = kept
    return kept


def meet(context: RankContext, group: dist.ProcessGroup) -> None:
    """Return once every rank of the group has called this, also after a collective that failed on some of them.

    An all-reduce of one element: gloo's barrier waits for the work before it, so it would raise the same error again.
    """
    dist.all_reduce(torch.ones(1, device=context.device), group=group)


class _Heard(logging.Handler):
    """Appends log messages of level WARNING or above to a list."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        self.into.append(record.getMessage())


@contextmanager
def recorded() -> Iterator[Sequence[str]]:
    """Yield a list to which the warnings of the block are added when it ends."""
    said: list[str] = []
    heard = _Heard(said)
    root = logging.getLogger()
    # Some libraries' loggers hand nothing on to the root.
    others = (logger for logger in root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
    ends = [root, *(logger for logger in others if not logger.propagate)]
    for logger in ends:
        logger.addHandler(heard)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(warning.message) for warning in caught]
    finally:
        for logger in ends:
            logger.removeHandler(heard)
