"""Asking a backend which groups of ranks it would build, on one rank, without building any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_conformance.backends.registry import load
from moe_conformance.engine import Engine, Job, JobResult, RankContext
from moe_conformance.topology import Layout, RankLists

GroupLists = Mapping[str, RankLists]


@dataclass(frozen=True)
class Question:
    """Which layouts to ask a backend about."""

    backend: str
    layouts: tuple[Layout, ...]


def group_lists(engine: Engine, backend: str, layouts: tuple[Layout, ...], deadline_s: float = 60.0) -> JobResult:
    """Ask on a rank, where importing the library costs the driver nothing.

    The value of rank 0 is a tuple with an entry per layout, or None where the backend has no `groups`.
    """
    function = "moe_conformance.scenarios.group_lists:run"
    return engine.run(Job(function, Question(backend, layouts), world=1, groups={}, deadline_s=deadline_s))


def run(context: RankContext, question: Question) -> tuple[GroupLists, ...] | None:
    """Answer for every layout."""
    groups = getattr(load(question.backend), "groups", None)
    return None if groups is None else tuple(groups(layout.sizes()) for layout in question.layouts)
