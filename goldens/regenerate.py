"""Writes the goldens, or checks them: `python -m moe_conformance.goldens.regenerate [--check] [--only CHAPTER]`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from torch import Tensor

from moe_conformance.goldens.chapter import Chapter
from moe_conformance.goldens.chapters import chapters
from moe_conformance.goldens.stored_values import (
    SUFFIX,
    AlteredError,
    DifferentError,
    Entry,
    GoldenError,
    check_folder,
    compare,
    read,
    read_manifest,
    write,
    write_manifest,
)

FOLDER = Path(__file__).resolve().parent  # in the checkout, not the link to it
# Of a tensor's largest element: libraries of linear algebra add up in orders of their own.
_RELATIVE = 1e-12


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", "checks", is_flag=True, help="change nothing; say what differs, exit with 1 if anything does")
@click.option("--only", "names", multiple=True, metavar="CHAPTER", help="leave the other chapters alone (repeatable)")
def main(checks: bool, names: Sequence[str]) -> None:
    """Write the goldens from the oracles, or check them."""
    known = chapters()
    if unknown := sorted(set(names) - set(known)):
        raise click.UsageError(f"no chapter {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = {name: known[name] for name in (names or known)}
    if checks:
        problems = list(check(FOLDER, chosen, list(known)))
        for problem in problems:
            click.echo(problem)
        if not problems:
            click.echo(f"{', '.join(chosen)}: as they were written")
        sys.exit(bool(problems))
    if dirty := _changes():
        raise click.ClickException(f"the checkout has changes that no commit holds ({dirty}); commit them first")
    for line in regenerate(FOLDER, chosen, _commit()):
        click.echo(line)


def check(folder: Path, chosen: Mapping[str, Chapter], known: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for everything in which the goldens differ from what their chapters would write.

    Args:
        folder: That of the goldens.
        chosen: The chapters to look at.
        known: Names of all chapters: a golden of another is unused.
    """
    try:
        yield from map(str, check_folder(folder, known))
        entries = read_manifest(folder)
    except GoldenError as error:
        yield str(error)
        return
    for name, chapter in chosen.items():
        if name in entries:
            yield from _check_entry(name, chapter, entries[name])
            yield from _check_file(folder, name, chapter)


def regenerate(folder: Path, chosen: Mapping[str, Chapter], commit: str) -> list[str]:
    """Write chapters anew, all or none of them; return what became different, in lines to read.

    Raises:
        GoldenError: the chapters that are left alone are not in order.
    """
    entries = read_manifest(folder) if any(folder.glob("manifest.json")) else {}
    for name in set(entries) - set(chosen):
        read(folder, name)  # raises if what is left alone was changed
    made = {name: _make(chapter) for name, chapter in chosen.items()}
    report = []
    for name, chapter in chosen.items():
        old = read(folder, name) if name in entries else {}
        lines = list(_differences(old, made[name]))
        report += [
            f"{name}: {len(lines)} of {len({*old, *made[name]})} tensors differ",
            *(f"  {line}" for line in lines),
        ]
        if lines or entries[name].requirements != chapter.requirements or entries[name].seed != chapter.seed:
            provenance = Entry(
                requirements=chapter.requirements, seed=chapter.seed, tensors={}, bytes=0, sha256="",
                suite=version("moe-conformance"), commit=commit, torch=torch.__version__,
            )  # fmt: skip
            entries[name] = write(folder, name, made[name], provenance)
    write_manifest(folder, entries)
    return report


def _make(chapter: Chapter) -> dict[str, Tensor]:
    inputs = chapter.draw(np.random.default_rng(chapter.seed))
    return {**inputs, **chapter.work_out(inputs, chapter.oracle)}


def _check_entry(name: str, chapter: Chapter, entry: Entry) -> Iterator[str]:
    if entry.requirements != chapter.requirements:
        yield f"{name}: the manifest says requirements {entry.requirements}, the chapter {chapter.requirements}"
    if entry.seed != chapter.seed:
        yield f"{name}: the manifest says seed {entry.seed}, the chapter {chapter.seed}"


def _check_file(folder: Path, name: str, chapter: Chapter) -> Iterator[str]:
    try:
        stored = read(folder, name)
    except AlteredError as error:
        yield str(error)
        try:  # the oracles can still say where
            stored = parse((folder / f"{name}{SUFFIX}").read_bytes())
        except SafetensorError:
            return
    except GoldenError as error:
        yield str(error)
        return
    # From the stored inputs, so that the check does not depend on how numpy draws.
    try:
        inputs = {key: value for key, value in stored.items() if "/in/" in key}
        worked_out = chapter.work_out(inputs, chapter.oracle)
    except Exception as error:  # whatever an oracle raises for inputs that it took once
        message = " ".join(str(error).split())  # on one line
        yield f"{name}: the oracles no longer work it out: {type(error).__name__}: {message}"
        return
    outputs = {key for key in stored if "/out/" in key}
    for key in sorted(outputs ^ set(worked_out)):
        yield f"{name}: {key} is {'no longer worked out' if key in outputs else 'not in the golden'}"
    for key in sorted(outputs & set(worked_out)):
        try:
            compare(name, key, stored[key], worked_out[key], _allowed(stored[key]))
        except DifferentError as error:
            yield str(error)


def _differences(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Iterator[str]:
    for key in sorted({*old, *new}):
        if key not in new:
            yield f"{key} is gone"
        elif key not in old:
            yield f"{key} is new: {str(new[key].dtype).removeprefix('torch.')} {list(new[key].shape)}"
        else:
            try:
                compare("", key, old[key], new[key], _allowed(old[key]))
            except DifferentError as error:
                yield str(error).removeprefix(": ")


def _allowed(stored: Tensor) -> float:
    if not stored.is_floating_point():
        return 0.0
    finite = stored[stored.isfinite()]  # beside an infinity the others are not free
    return _RELATIVE * float(finite.abs().max()) if len(finite) else 0.0


def _changes() -> str:
    """Return the first changed file that is not a golden; "" if all is committed."""
    own = (f":!goldens/*{SUFFIX}", ":!goldens/manifest.json")
    status = _git("status", "--porcelain", "--", ".", *own)
    return status.splitlines()[0].strip() if status else ""


def _commit() -> str:
    return _git("rev-parse", "HEAD").strip()


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    if run.returncode:
        raise click.ClickException(f"goldens are written in a git checkout: {run.stderr.strip()}")
    return run.stdout


if __name__ == "__main__":
    main()
