"""The clauses of requirements: the parts of a sentence that can be violated one by one, each with the bug that does.

`self_tests/chapters/<chapter>/clauses.toml` has them by requirement. A key is a verbatim part of the sentence or of the
formula, the value a planted bug or a lying backend that violates it and leaves the others of the requirement alone:

    [BIAS-10]
    "have no gradient" = "bias-trained"
    "NOT be changed by optimiser or weight decay" = "bias-as-parameter"

A requirement with one clause, which is its sentence, has the bug alone: `BIAS-11 = "layers-together"`. What a sentence
leaves free ("unless", "or, where declared") is no clause. What no bug can violate does not belong into a sentence.
`python -m tools.clauses` runs them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_conformance.spec import Requirement
from self_tests.lying_backends.expected import LIARS
from self_tests.planted_bugs import plants, plants_of_many_ranks

CHAPTERS = Path(__file__).parents[1] / "chapters"
_DEMAND = re.compile(r"\b(?:MUST|SHOULD)\b")


@dataclass(frozen=True)
class Clause:
    """One clause."""

    requirement: str
    text: str  # "" where it is the whole sentence
    bug: str  # the name of a planted bug, or of the class of a lying backend


@cache
def clauses() -> Mapping[str, tuple[Clause, ...]]:
    """Return the clauses by requirement, from the files of all chapters."""
    found: dict[str, tuple[Clause, ...]] = {}
    for path in sorted(CHAPTERS.glob("*/clauses.toml")):
        for id, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
            texts = {"": entry} if isinstance(entry, str) else entry
            found[id] = tuple(Clause(id, text, bug) for text, bug in texts.items())
    return found


@cache
def bugs() -> Mapping[str, frozenset[str]]:
    """Return the requirements that every planted bug and lying backend is detected by."""
    found = {each.name: {e.requirement for e in each.expects} for each in (*plants(), *plants_of_many_ranks())}
    for liar, requirement, *_ in LIARS:
        found.setdefault(liar.__name__, set()).add(requirement)
    return {name: frozenset(requirements) for name, requirements in found.items()}


def problems(requirement: Requirement, of_it: tuple[Clause, ...], known: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Yield what is wrong with the clauses of a requirement that has a check."""
    id, demands = requirement.id, len(_DEMAND.findall(requirement.sentence))
    if len(of_it) < demands:
        yield f"{id}: {len(of_it)} clauses, and the sentence has {demands} times MUST or SHOULD"
    for clause in of_it:
        if clause.text not in requirement.sentence and clause.text not in requirement.formula:
            yield f"{id}: {clause.text!r} is neither in the sentence nor in the formula"
        if id not in known.get(clause.bug, ()):
            yield f"{id}: no planted bug {clause.bug!r} is expected to violate it"
    shared = sorted({clause.bug for clause in of_it if [each.bug for each in of_it].count(clause.bug) > 1})
    yield from (f"{id}: {bug} stands for several clauses; each has a bug that violates it alone" for bug in shared)
