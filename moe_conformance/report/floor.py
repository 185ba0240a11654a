"""The floor of a backend: how much must pass. A run that falls below it fails; one in which more passes does not.

A floor counts checks on cases that pass: by requirement, variant and layout (a place), and by requirement and trait
(dtype, K, uneven T, a rank without tokens, microbatches). It is of one release of the library, one device and one
profile; `floor_file` describes the file. A floor that was written before there were counts holds places alone: some
of its cases must pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import Version

from moe_conformance.report.records import FAILING
from moe_conformance.report.standing import Place, Standing, in_words

RANKS = 4  # of the run from which a floor of the quick profile is written
BELOW = "below the floor"  # how a sentence of `Floor.sentences` begins
_SHOWN = 5  # places and traits in a sentence
_UNCOUNTED = 0


@dataclass(frozen=True)
class Floor:
    """What must pass with a release of the library, on a device and in a profile.

    Attributes:
        path: Of the file.
        places: How many checks on cases must pass in each place; 0 if the floor has no counts.
        traits: By requirement, how many must pass that have a trait.
        versions: Of the library and of torch with which they did; empty if the file has none.
        device: "cpu" or "cuda".
        profile: "quick" or "full".
    """

    path: Path
    places: Mapping[Place, int]
    traits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    profile: str = "quick"

    def is_of(self, versions: Mapping[str, str]) -> bool:
        """Whether it is of these versions: of all packages but torch they are of the same release."""
        return all(
            _release(versions.get(name)) == _release(held) for name, held in self.versions.items() if name != "torch"
        )

    def sentences(self, found: Mapping[Place, Standing], run: Collection[Place]) -> Iterator[str]:
        """Yield a sentence on the places that fell, and one on the traits.

        Args:
            found: The standings of the run.
            run: The places of which the run had all cases, or has to have had; others are not compared.
        """
        fallen = list(self.fallen(found, run))
        if fallen:
            lost = sum(self.places[place] - _reached(found.get(place)) for place, _ in fallen if self.places[place])
            passes = f", by {lost} passes" if lost else ""
            told = [f"{in_words(place)}: {how}" for place, how in fallen]
            yield f"{BELOW} in {len(fallen)} places{passes}: {_some(told)}"
        told = list(self.fallen_traits(found, run))
        if told:
            yield f"{BELOW} in {len(told)} traits: {_some(told)}"

    def fallen(self, found: Mapping[Place, Standing], run: Collection[Place]) -> Iterator[tuple[Place, str]]:
        """Yield each place in which less passes than must, with what happens instead.

        What failed or crashed is left out, since it is reported by itself, and so are layouts for more ranks.
        """
        for place in sorted(self.places.keys() & set(run)):
            stands, held = found.get(place), self.places[place]
            if stands is None:
                yield place, "not run instead of pass"
            elif stands.too_large:
                continue
            elif held == _UNCOUNTED:
                if not stands.passed and not stands.told:
                    yield place, f"{stands.verdict} instead of pass"
            elif stands.reached < held:
                yield place, _instead(stands, held)

    def fallen_traits(self, found: Mapping[Place, Standing], run: Collection[Place]) -> Iterator[str]:
        """Yield a text for each trait of which less passes than must: of requirements all of whose places were run."""
        fell: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)
        for requirement, traits in self.traits.items():
            held = [place for place in self.places if place[0] == requirement]
            stands = [found[place] for place in held if place in found]
            if not set(held) <= set(run) or any(each.too_large for each in stands):
                continue
            told = sum(each.told for each in stands)
            for trait, least in traits.items():
                passed = sum(each.traits.get(trait, 0) for each in stands)
                if passed + told < least:
                    fell[trait][requirement] = passed, least
        for trait, by_requirement in fell.items():
            passed, least = (sum(numbers) for numbers in zip(*by_requirement.values(), strict=True))
            yield f"{trait}: {passed} of {least} pass, in {_some(list(by_requirement), ', ')}"

    def of_places(self) -> Floor:
        """Return it without its counts."""
        return replace(self, places=dict.fromkeys(self.places, _UNCOUNTED), traits={})


def chosen(floors: Iterable[Floor], versions: Mapping[str, str], device: str, profile: str) -> Floor | None:
    """Return the floor to which a run is held, None if there is none.

    The full profile runs what the quick one does, and more of which some may be refused: without a floor of its own it
    is held to the places of that of the quick one.
    """
    found = {held.profile: held for held in floors if held.device == device and held.is_of(versions)}
    if profile == "full" and profile not in found and "quick" in found:
        return found["quick"].of_places()
    return found.get(profile)


def elsewhere(floors: Iterable[Floor], device: str, profile: str) -> str:
    """Return a sentence for a run that none of its backend's floors is for."""
    held = (
        f"{' '.join(f'{name} {version}' for name, version in each.versions.items())}, {each.profile} on {each.device}"
        for each in floors
    )
    return f"held to no floor: none is for this version, {profile} on {device}; there are floors of {'; '.join(held)}"


def _release(version: str | None) -> tuple[int, int] | str | None:
    """Return major and minor of a published version; that of a checkout whole, with the commit behind its plus sign."""
    if version is None or Version(version).local:
        return version
    return Version(version).major, Version(version).minor


def _reached(stands: Standing | None) -> int:
    return 0 if stands is None else stands.reached


def _instead(stands: Standing, held: int) -> str:
    """Return how a place stands in which less than `held` passes."""
    others = [f"{cases} {verdict}" for verdict, cases in stands.count.items() if verdict not in ("pass", *FAILING)]
    if not stands.passed and len(others) == 1:
        return f"{stands.verdict} instead of {held} {'pass' if held == 1 else 'passes'}"
    return ", ".join([f"{stands.passed} of {held} pass", *others])


def _some(told: list[str], between: str = "; ") -> str:
    more = [f"{len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    return between.join([*told[:_SHOWN], *more])
