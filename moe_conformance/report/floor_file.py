"""The files of floors: `floors/<backend>.toml`, and `floors/<backend>@<version>.toml` for another release of a library.

A file names the versions, the device and the profile of the run that it was written from. It counts the checks on cases
that passed, in a table for each variant with a line for each requirement; and with all variants and layouts together,
by dtype, K, and what the batches have. The most frequent dtype and K of a requirement are left out, to keep the file
short: if fewer of these pass, and not more of others, a count by layout falls as well.

    versions = {"torchtitan" = "0.3.0", "torch" = "2.13.0"}
    device = "cpu"
    profile = "quick"

    [passes.alltoall]
    EXCH-01 = "21 single 17 ep2 9 ep4"

    [traits]
    EXCH-01 = "7 bfloat16 2 K=3 11 uneven-T 5 zero-tokens"

In a file of the older form a table is a variant, without `passes`, and a line names layouts without numbers.
`moe-conformance floor --backend NAME` writes the file from a run; a person reviews the difference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_conformance import reading
from moe_conformance.report.floor import Floor
from moe_conformance.report.standing import Place, Standing
from moe_conformance.workloads.records.told import CONDITIONS, DTYPES, K, value_of_K

FOLDER = Path(__file__).parents[1] / "floors"
_MOST_BYTES = 1 << 22  # of a file

_HEAD = "# What must pass, see report/floor_file.py. Written by `moe-conformance floor`, reviewed by a person."
_USUAL = {"device": "cpu", "profile": "quick"}
_PASSES, _TRAITS = "passes", "traits"


def _written(trait: str) -> str:
    """Return a trait without spaces, as it stands in a file."""
    return trait.replace(" ", "-")


_WRITTEN = frozenset(map(_written, CONDITIONS))


class Unreadable(ValueError):
    """The file is no floor, or cannot be read."""


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


def path_to_write(backend: str, versions: Mapping[str, str], device: str, profile: str) -> Path:
    """Return the file of the floor of these versions on a device in a profile: the one that there is, or a new one."""
    held = of_backend(backend)
    for each in held:
        if each.is_of(versions) and (each.device, each.profile) == (device, profile):
            return each.path
    default = bool(held) and held[0].is_of(versions)
    library = next((version for name, version in versions.items() if name != "torch"), "")
    unusual = [value for value in (device, profile) if value not in _USUAL.values()]
    parts = [part for part in ("" if default or not held else library, *unusual) if part]
    return FOLDER / f"{'@'.join([backend, '-'.join(parts)] if parts else [backend])}.toml"


# ---- reading ---------------------------------------------------------------------------------------------------------


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
    if not _texts(versions):
        raise Unreadable(f'the floor {path} gives versions as versions = {{"torch" = "2.13.0"}}, not {versions!r}')
    if _PASSES not in tables:
        return Floor(path, _places_of_old(path, tables), versions=versions)
    passes, traits = tables.pop(_PASSES), tables.pop(_TRAITS, {})
    of = {name: tables.pop(name, usual) for name, usual in _USUAL.items()}
    if tables or not _texts(of):
        raise Unreadable(f"the floor {path} has versions, device, profile, passes and traits, and not {[*tables, of]}")
    if not isinstance(passes, dict):
        raise Unreadable(f"the floor {path} has a table for each variant, such as [passes.alltoall]")
    places: dict[Place, int] = {}
    for variant, requirements in passes.items():
        for requirement, counts in _counts(path, requirements).items():
            places.update({(requirement, variant, layout): number for layout, number in counts.items()})
    return Floor(path, places, _counts(path, traits), versions, **of)


def _places_of_old(path: Path, tables: Mapping[str, Any]) -> dict[Place, int]:
    """Return the places of a floor without counts."""
    places: dict[Place, int] = {}
    for variant, requirements in tables.items():
        if not _texts(requirements):
            raise Unreadable(f'the floor {path} has a table for each variant, of lines such as EXCH-01 = "12 ep2"')
        for requirement, layouts in requirements.items():
            places.update({(requirement, variant, layout): 0 for layout in layouts.split()})
    return places


def _counts(path: Path, table: object) -> dict[str, dict[str, int]]:
    """Return the numbers in the lines of a table, by name.

    Raises:
        Unreadable: a line is not of the form `EXCH-01 = "12 single 3 ep2"`.
    """
    form = f'the floor {path} has lines such as EXCH-01 = "12 single 3 ep2"'
    if not isinstance(table, dict):
        raise Unreadable(f"{form}, in tables; not {table!r}")
    found: dict[str, dict[str, int]] = {}
    for requirement, line in table.items():
        if not isinstance(line, str) or not re.fullmatch(r"[1-9]\d* \S+( [1-9]\d* \S+)*", line):
            raise Unreadable(f"{form}, not {requirement} = {line!r}")
        words = line.split(" ")
        names = (name.replace("-", " ") if name in _WRITTEN else name for name in words[1::2])
        found[requirement] = dict(zip(names, map(int, words[::2]), strict=True))
    return found


def _texts(table: object) -> bool:
    return isinstance(table, dict) and all(isinstance(value, str) for value in table.values())


# ---- writing ---------------------------------------------------------------------------------------------------------


def text(found: Mapping[Place, Standing], layouts: Iterable[str], head: Mapping[str, Any]) -> str:
    """Return the floor of a run as TOML: what passes, layouts in the given order.

    Args:
        found: The standings of the run.
        layouts: All of them.
        head: Of its report: versions, device and profile.
    """
    versions = ", ".join(f'"{name}" = "{version}"' for name, version in head["versions"].items())
    lines = [_HEAD, f"versions = {{{versions}}}", *(f'{name} = "{head[name]}"' for name in _USUAL)]
    order = [*layouts, "any"]
    by_variant: dict[str, dict[str, Counter[str]]] = {}
    by_trait: dict[str, Counter[str]] = {}
    for (requirement, variant, layout), stands in found.items():
        if stands.passed:
            by_variant.setdefault(variant, {}).setdefault(requirement, Counter())[layout] = stands.passed
            by_trait.setdefault(requirement, Counter()).update(stands.traits)
    for variant, requirements in by_variant.items():
        lines += ["", f'[{_PASSES}."{variant}"]', *_lines(requirements, order)]
    most = max((value_of_K(trait) or 0 for traits in by_trait.values() for trait in traits), default=0)
    traits = [*DTYPES, *(f"{K}{value}" for value in range(most + 1)), *CONDITIONS]
    rarer = {requirement: _rarer(counts) for requirement, counts in by_trait.items()}
    lines += ["", f"[{_TRAITS}]", *_lines(rarer, traits)]
    return "\n".join(lines) + "\n"


def _rarer(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts without those of the most frequent dtype and of the most frequent K."""
    dtypes = [trait for trait in counts if trait in DTYPES]
    Ks = [trait for trait in counts if value_of_K(trait) is not None]
    most = {max(values, key=counts.__getitem__) for values in (dtypes, Ks) if values}
    return {trait: number for trait, number in counts.items() if trait not in most}


def _lines(table: Mapping[str, Mapping[str, int]], order: Sequence[str]) -> Iterator[str]:
    for id, counts in sorted(table.items()):
        if counts:
            named = (f"{counts[name]} {_written(name)}" for name in sorted(counts, key=order.index))
            yield f'{id} = "{" ".join(named)}"'
