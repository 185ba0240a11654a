"""Ask a backend which process groups it would build. No group is made.

The backend is asked on a rank, since this may import its library.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_conformance.backends.registry import load
from moe_conformance.contract import Unsupported
from moe_conformance.engine import Engine, Job, RankContext
from moe_conformance.scenarios.outcome import GroupAnswer
from moe_conformance.scenarios.proof import refused_by
from moe_conformance.workloads.records.workload import SIZES, Wish


@dataclass(frozen=True)
class Question:
    """The backend and the sizes for which a rank calls its method `groups`."""

    backend: str  # a name of the registry or pkg.mod:Class
    wishes: tuple[Wish, ...]


class NoAnswer(Exception):
    """The rank hung or died while the backend was asked; the message says what happened there."""


def group_lists(engine: Engine, backend: str, wishes: tuple[Wish, ...]) -> list[GroupAnswer]:
    """Return the backend's answer to every wish.

    Raises:
        NoAnswer: the rank did not answer.
    """
    question = Question(backend, wishes)
    job = Job("moe_conformance.scenarios.group_lists:ask", payload=question, world=1, groups={})
    result = engine.run(job).ranks[0]
    if result.status != "ok":
        raise NoAnswer(f"{result.error}\n{result.traceback or ''}")
    return list(result.value or ())


def ask(context: RankContext, question: Question) -> list[GroupAnswer]:
    """Call the backend's `groups` for every wish, on this rank."""
    del context  # any rank knows the same
    backend = load(question.backend)
    return [_answer_of(backend, wish) for wish in question.wishes]


def _answer_of(backend: object, wish: Wish) -> GroupAnswer:
    sizes = {name: getattr(wish.layout, name) for name in SIZES}
    order = (wish.order,) if wish.order else ()
    try:
        return GroupAnswer(dict(backend.groups(sizes, *order)))  # type: ignore[attr-defined]  # optional; the driver looked
    except Unsupported as error:
        return GroupAnswer(None, str(error), refused_by(error, backend))
    except Exception as error:
        return GroupAnswer(None, f"{type(error).__name__}: {error}", "raised")
