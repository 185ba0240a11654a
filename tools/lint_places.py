"""Hold the repository against the spec: what has a check has an oracle, a line of native and a planted bug as well.

`python -m tools.lint_places` prints a line for each place that is missing, and fails if there is one. What an oracle or
native has no line for, the TOML says with a reason, `without_oracle` or `without_native`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from moe_conformance import spec
from moe_conformance.spec import Requirement
from moe_conformance.spec.places import Place, Places


def problems(places: Places, requirements: Mapping[str, Requirement]) -> Iterator[str]:
    """Yield a line for everything that is missing or should not be there."""
    for id in requirements:
        if id in places.checked:
            yield from _missing(places, requirements[id])
    for id in sorted({*places.claimed, *places.implemented} - requirements.keys()):
        yield from (f"{place}: says `Decides: {id}`, which is no requirement" for place in places.claimed.get(id, ()))
        yield from (
            f"{place}: says `Implements: {id}`, which is no requirement" for place in places.implemented.get(id, ())
        )


def _missing(places: Places, requirement: Requirement) -> Iterator[str]:
    id, oracles = requirement.id, places.oracles(requirement.id)
    absent = f"{id}: no oracle that its checks reach says `Decides: {id}`"
    yield from _either("without_oracle", requirement.without_oracle, oracles, id, absent)
    for place in places.claimed.get(id, ()):
        if place not in oracles:
            yield f"{id}: {place} says `Decides: {id}`, and no check of it reaches that"
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
