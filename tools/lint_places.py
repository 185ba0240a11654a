"""Hold the repository against the spec: what has a check has an oracle, a line of native and a planted bug as well.

`python -m tools.lint_places` prints a line for each place that is missing, and fails if there is one. What an oracle or
native has no line for, the TOML says with a reason, `without_oracle` or `without_native`. An oracle counts only where
it is stored that a change of its result changes a verdict, which `python -m tools.deciding_oracles` finds out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from moe_conformance import spec
from moe_conformance.spec import Requirement
from moe_conformance.spec.places import Place, Places

_AGAIN = "run `python -m tools.deciding_oracles`"


def problems(places: Places, requirements: Mapping[str, Requirement]) -> Iterator[str]:
    """Yield a line for everything that is missing or should not be there."""
    for id in requirements:
        if id in places.checked:
            yield from _missing(places, requirements[id])
    for id in sorted({*places.claimed, *places.implemented} - requirements.keys()):
        claims = places.claims(id).values()
        yield from (f"{place}: says `Decides: {id}`, which is no requirement" for place in claims)
        yield from (
            f"{place}: says `Implements: {id}`, which is no requirement" for place in places.implemented.get(id, ())
        )
    for id, stored in places.decided.items():
        absent = sorted(stored.keys() - places.claims(id).keys()) if id in places.checked else sorted(stored)
        yield from (f"{id}: {oracle} is stored as deciding it, and does not say so; {_AGAIN}" for oracle in absent)


def _missing(places: Places, requirement: Requirement) -> Iterator[str]:
    id, oracles = requirement.id, places.oracles(requirement.id)
    absent = f"{id}: no oracle whose result its checks compare says `Decides: {id}`"
    yield from _either("without_oracle", requirement.without_oracle, oracles, id, absent)
    for place in places.claims(id).values():
        if place not in oracles:
            yield f"{id}: {place} says `Decides: {id}`, and was not seen to; {_AGAIN}"
    absent = f"{id}: no line of native says `Implements: {id}`"
    yield from _either("without_native", requirement.without_native, places.native(id), id, absent)
    if not places.plants(id):
        yield f"{id}: no planted bug expects it"


def _either(field: str, reason: str, found: Sequence[Place], id: str, absent: str) -> Iterator[str]:
    """Yield what is wrong where there is neither a place nor a reason for its absence, or both."""
    if not found and not reason:
        yield f"{absent}, and the spec gives no `{field}`"
    if found and reason:
        yield f"{id}: the spec gives a reason `{field}`, and there is {found[0]}"


def main() -> int:
    """Print the problems of this repository; 1 if there are any."""
    found = list(problems(Places(), spec.load()))
    for each in found:
        print(each)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
