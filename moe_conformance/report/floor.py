"""The floor of a backend: what must pass, by requirement, variant and layout. A run that falls below it fails.

TOML files, `floors/<backend>.toml` and, for another version of its library, `floors/<backend>@<version>.toml`: the
versions of what was judged, and a table for each variant, in it a line for each requirement with the layouts on which
it passes in the quick profile on 4 ranks. A run is held to the floor of its library's release, such as 0.19; that of a
checkout, to the floor of this very commit.

    versions = {"torchtitan" = "0.3.0", "torch" = "2.13.0"}

    [alltoall]
    EXCH-01 = "single ep2 ep4"

`moe-conformance floor --backend NAME` writes it from a run; a person reviews the difference. Without a floor a backend
could refuse what it supported before, and every run would pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from moe_conformance import reading
from moe_conformance.report.records import CASE_CRASHED, FAILING, Record
from moe_conformance.report.standing import Place, Standing, in_words, places, standings

FOLDER = Path(__file__).parents[1] / "floors"
_MOST_BYTES = 1 << 22  # of a file
RANKS = 4  # of the run from which a floor is written

_HEAD = "# What must pass in the quick profile on 4 ranks. Written by `moe-conformance floor`, reviewed by a person."


class Unreadable(ValueError):
    """The file is no floor, or cannot be read."""


@dataclass(frozen=True)
class Floor:
    """The places that must pass, and the versions of the library and of torch with which they did."""

    path: Path
    places: frozenset[Place]
    versions: Mapping[str, str] = field(default_factory=dict)  # empty if the file has none

    def is_of(self, versions: Mapping[str, str]) -> bool:
        """Whether a run of these versions is held to it: of all packages but torch they are of the same release."""
        return all(
            _release(versions.get(name)) == _release(held) for name, held in self.versions.items() if name != "torch"
        )

    def fallen(self, records: Iterable[Record], run: Collection[Place]) -> Iterator[tuple[Place, str]]:
        """Yield each place that no longer passes, with its verdict.

        Places that fail are left out, and those not run since their case crashed: these are reported as failures.

        Args:
            records: Of the run.
            run: The places of which the run had all cases; others are not compared.
        """
        records = list(records)
        found = standings(records)
        crashed = places(record for record in records if record.kind == CASE_CRASHED)
        for place in sorted(self.places & set(run)):
            stands = found.get(place)
            verdict = "not run" if stands is None else stands.verdict
            if verdict == "not run" and place in crashed:
                continue
            if verdict not in ("pass", "not applicable", *FAILING):
                yield place, verdict


def of_backend(target: str) -> tuple[Floor, ...]:
    """Return the installed floors of a backend, that of its default versions first.

    Raises:
        Unreadable: one of them cannot be read or is none.
    """
    if ":" in target:
        return ()
    paths = [FOLDER / f"{target}.toml", *sorted(FOLDER.glob(f"{target}@*.toml"))]
    return tuple(read(path) for path in paths if path.is_file())


def backends() -> tuple[str, ...]:
    """Return the names of the backends that have a floor, sorted."""
    return tuple(sorted({path.stem.partition("@")[0] for path in FOLDER.glob("*.toml")}))


def path_to_write(backend: str, versions: Mapping[str, str]) -> Path:
    """Return the file of the floor of these versions: the one that there is, or a new one."""
    held = of_backend(backend)
    if found := next((each.path for each in held if each.is_of(versions)), None):
        return found
    library = next((version for name, version in versions.items() if name != "torch"), "")
    return FOLDER / (f"{backend}@{library}.toml" if held else f"{backend}.toml")


def _release(version: str | None) -> tuple[int, int] | str | None:
    """Return major and minor of a published version; that of a checkout whole, with the commit behind its plus sign."""
    if version is None or Version(version).local:
        return version
    return Version(version).major, Version(version).minor


def read(path: Path) -> Floor:
    """Return the floor in a file.

    Raises:
        Unreadable: it cannot be read or is none.
    """
    try:
        tables = reading.toml_of(path, _MOST_BYTES)
    except reading.Unreadable as error:
        raise Unreadable(f"the floor {path} cannot be used: {error}") from error
    versions = tables.pop("versions", {})
    places = set()
    if not _texts(versions):
        raise Unreadable(f'the floor {path} gives versions as versions = {{"torch" = "2.13.0"}}, not {versions!r}')
    for variant, requirements in tables.items():
        if not _texts(requirements):
            raise Unreadable(f'the floor {path} is a table for each variant, of lines such as EXCH-01 = "ep2 ep4"')
        for requirement, layouts in requirements.items():
            places |= {(requirement, variant, layout) for layout in layouts.split()}
    return Floor(path, frozenset(places), versions)


def _texts(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(value, str) for value in table.values())


def text(standing: Mapping[Place, Standing], layouts: Iterable[str], versions: Mapping[str, str]) -> str:
    """Return the floor of a run of these versions as TOML: what passes, layouts in the given order."""
    order = {layout: number for number, layout in enumerate((*layouts, "any"))}
    by_variant: dict[str, dict[str, list[str]]] = {}
    for (requirement, variant, layout), stands in standing.items():
        if stands.verdict == "pass":
            by_variant.setdefault(variant, {}).setdefault(requirement, []).append(layout)
    found = ", ".join(f'"{name}" = "{version}"' for name, version in versions.items())
    lines = [_HEAD, f"versions = {{{found}}}"]
    for variant, requirements in by_variant.items():
        lines += ["", f'["{variant}"]']
        for id, passing in sorted(requirements.items()):
            lines.append(f'{id} = "{" ".join(sorted(passing, key=order.__getitem__))}"')
    return "\n".join(lines) + "\n"


def of_other_versions(floors: Iterable[Floor]) -> str:
    """Return a sentence for a run that none of its backend's floors is for."""
    versions = (" ".join(f"{name} {version}" for name, version in held.versions.items()) for held in floors)
    return f"held to no floor: there are floors of {', of '.join(versions)}"


def sentence(fallen: Iterable[tuple[Place, str]]) -> str:
    """Return a sentence with the first places below the floor and their number; "" if there is none."""
    found = [f"{in_words(place)}: {verdict} instead of pass" for place, verdict in fallen]
    if not found:
        return ""
    more = f"; {len(found) - 5} more" if len(found) > 5 else ""
    return f"below the floor in {len(found)} places: {'; '.join(found[:5])}{more}"
