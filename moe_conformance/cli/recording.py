"""`record` and `rejudge`: outcomes of a library as data, and their verdicts today."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from moe_conformance.cli.base import CannotRun, main, require_torch, with_options
from moe_conformance.plugin import options


@main.command(name="record")
@with_options(("backend", "library", "only"))
@click.option("--cases", type=click.Path(path_type=Path), metavar="FILE", help="record these cases: an id in each line")
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR", help="folder of recordings")
def record_(cases: Path | None, output: Path, **given: Any) -> None:
    """Run cases and store what ranks observed, so that it can be judged where the library is not.

    With --only one case of each requirement is run: the first that a check of it reads. Written are a document and a
    file of tensors for each case, into DIR/BACKEND/VERSION.
    """
    require_torch()
    import torch

    from moe_conformance import spec
    from moe_conformance.engine import EngineError
    from moe_conformance.plugin.run import open_backend
    from moe_conformance.recorded import recording
    from moe_conformance.recorded.pools import BadRecording
    from moe_conformance.workloads.plan import Plan

    sys.path.append(os.getcwd())  # as in `run`
    torch.set_num_threads(1)  # the oracles' tensors are tiny
    try:
        chosen = options.from_mapping(given)
        if (cases is None) == (not chosen.ids):
            raise CannotRun("say what to record: --only ID,ID or --cases FILE")
        if unknown := [id for id in chosen.ids if id not in spec.load()]:
            raise CannotRun(f"no requirement {', '.join(unknown)}; `moe-conformance list requirements` shows all")
        backend, versions = open_backend(chosen.backend, chosen.library)
        plan = Plan(backend, "cpu", "quick")
        found = (
            recording.first_cases(plan, chosen.ids)
            if cases is None
            else recording.named_cases(plan, _lines(cases.read_text(encoding="utf-8")))
        )
        recording.record(recording.Subject(chosen.backend, backend, versions), found, output, click.echo)
    except (options.Unusable, EngineError, BadRecording, OSError) as error:
        raise CannotRun(str(error)) from error


@main.command(name="rejudge")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@click.option("--accept", is_flag=True, help="store the verdicts of today, where they differ by intention")
def rejudge_(folders: tuple[Path, ...], accept: bool) -> NoReturn:
    """Judge recorded outcomes again, and print the verdicts that differ from those that are stored.

    No library is needed, and nothing runs. Exit status: 1 if anything differs, 2 if a recording cannot be judged.
    """
    require_torch()
    import torch

    from moe_conformance.backends import registry
    from moe_conformance.recorded import again, files
    from moe_conformance.recorded.pools import BadRecording
    from moe_conformance.workloads.plan import Plan

    paths = sorted(path for folder in folders for path in folder.rglob("*.json"))
    if not paths:
        raise CannotRun(f"there are no recordings in {', '.join(map(str, folders))}")
    torch.set_num_threads(1)  # as in `record`
    plans: dict[str, Plan] = {}
    differing = 0
    try:
        for path in paths:
            recorded = files.read(path)
            if recorded.backend not in registry.names():  # a dotted path would be imported
                raise CannotRun(f"{path} is of {recorded.backend!r}, which is no registered backend")
            if recorded.backend not in plans:
                plans[recorded.backend] = Plan(registry.load(recorded.backend), "cpu", "quick")
            today = again.judged_again(recorded, plans[recorded.backend])
            sentences = list(again.differences(recorded, today))
            for sentence in sentences:
                click.echo(sentence)
            differing += len(sentences)
            if accept and today != recorded.verdicts:
                files.write(path.parent, again.accepted(recorded, today))
    except BadRecording as error:
        raise CannotRun(str(error)) from error
    click.echo(f"{len(paths)} recordings, {differing} verdicts differ")
    sys.exit(int(bool(differing and not accept)))


def _lines(text: str) -> list[str]:
    """Return the ids in a file: one in each line, without what follows a `#`."""
    return [id for line in text.splitlines() if (id := line.partition("#")[0].strip())]
