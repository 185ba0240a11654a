"""Find the oracles that decide each requirement, and store them: `python -m tools.deciding_oracles [ID ...]`.

An oracle decides where a change of its result changes the verdict of a check of the requirement: native's run, which
passes, fails, or a planted bug's run passes. Those whose docstrings say `Decides: ID` are tried on the cases of the
planted bugs. What is stored for a requirement is the case on which each of its oracles was seen to decide, as soon as
it is found. Without an id all those are tried that claim a requirement and are not stored yet. `--all` prints instead
which of all other oracles decide.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from moe_conformance import spec
from moe_conformance.spec.deciding import FILE, read, text
from moe_conformance.spec.places import Places
from self_tests.checked_runs import NATIVE
from self_tests.spec.deciding import oracles
from self_tests.spec.deciding_cases import Bench, Case, cases, seen

_TRIES = {False: 4, True: 12}  # cases of native, and then of planted bugs, in which an oracle is called
Claims = Mapping[str, frozenset[str]]  # by requirement: the names of oracles


def look(claims: Claims) -> Iterator[tuple[str, str, Case]]:
    """Yield which of some oracles decide each requirement, and on which case; native's cases come first.

    One that is called in several cases of native and decides none is tried on planted bugs, and then given up.
    """
    found = set[tuple[str, str]]()
    bench = Bench()
    try:
        for of_bugs in (False, True):
            tries = Counter[tuple[str, str]]()
            for case, ids in _by_case(claims, of_bugs).items():
                left = {id: [each for each in claims[id] if (id, each) not in found] for id in ids}
                left = {id: [each for each in names if tries[id, each] < _TRIES[of_bugs]] for id, names in left.items()}
                left = {id: names for id, names in left.items() if names}
                for id, judgements in bench.judgements(case, list(left)).items() if left else ():
                    for oracle, decides in seen(judgements, left[id]).items():
                        tries[id, oracle] += 1
                        if decides:
                            found.add((id, oracle))
                            yield id, oracle, case
    finally:
        bench.close()


def _by_case(ids: Iterable[str], of_bugs: bool) -> dict[Case, list[str]]:
    found: dict[Case, list[str]] = {}
    for id in ids:
        for case in cases().get(id, {}).values():
            if (case.backend != NATIVE) is of_bugs:
                found.setdefault(case, []).append(id)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Look for the oracles of some requirements, or of all; 1 if one that claims a requirement does not decide it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help="a requirement")
    parser.add_argument("--all", action="store_true", help="print which other oracles decide it; stores nothing")
    given = parser.parse_args(arguments)
    places = Places()
    claims = {id: frozenset(places.claims(id)) for id in spec.load() if id in places.checked}
    if given.all:
        for id, oracle, case in look({id: frozenset(oracles()) - claims[id] for id in given.ids}):
            print(f"{id}: {oracle} on {case}")
        return 0
    before = {
        id: {each: case for each, case in stored.items() if each in claims.get(id, ())} for id, stored in read().items()
    }
    found = {id: stored for id, stored in before.items() if id not in given.ids}
    asked = {id: claims[id] for id in given.ids} or {id: each - found.get(id, {}).keys() for id, each in claims.items()}
    left = {(id, oracle) for id, names in asked.items() for oracle in names}
    for id, oracle, case in look(asked):
        found.setdefault(id, {})[oracle] = str(case)
        left.remove((id, oracle))
        _store(found)
    _store(found)
    for id, oracle in sorted(left):
        print(f"{id}: {oracle} says `Decides: {id}`, and no change of its result changes a verdict")
    return 1 if left else 0


def _store(found: Mapping[str, Mapping[str, str]]) -> None:
    FILE.write_text(text({id: stored for id, stored in found.items() if stored}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
