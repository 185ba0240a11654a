"""Asks a backend which groups it would build. On a rank, since asking may import the library; no group is made."""

from __future__ import annotations

from dataclasses import dataclass

from moe_conformance.backends.registry import load
from moe_conformance.contract import Unsupported
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.topology import Layout, RankLists

Lists = dict[str, RankLists]


@dataclass(frozen=True)
class Question:
    """What the one rank is asked."""

    backend: str  # a name of the registry or pkg.mod:Class
    layouts: tuple[Layout, ...]


class CannotTell(Exception):
    """Asking raised, hung or killed the rank; the message says what happened there."""


def group_lists(engine: Engine, backend: str, layouts: tuple[Layout, ...]) -> list[Lists | str]:
    """Return, for every layout, rank lists by name or the reason why the backend has none.

    Raises:
        CannotTell: the rank did not answer.
    """
    question = Question(backend, layouts)
    job = Job("moe_conformance.scenarios.group_lists:ask", payload=question, world=1, groups={})
    result = engine.run(job).ranks[0]
    if result.status != "ok":
        raise CannotTell(f"{result.error}\n{result.traceback or ''}")
    return list(result.value or ())


def ask(context: RankContext, question: Question) -> list[Lists | str]:
    """Ask for every layout."""
    del context  # any rank knows the same
    backend = load(question.backend)
    answers: list[Lists | str] = []
    for layout in question.layouts:
        try:
            answers.append(dict(backend.groups(layout.sizes())))  # type: ignore[attr-defined]  # optional; the driver looked
        except Unsupported as error:
            answers.append(str(error))
    return answers
