"""`parity`: training steps of a backend on every kind of layout, held against one device."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from moe_conformance.cli.base import CannotRun, main, require_torch, with_options
from moe_conformance.plugin import options

if TYPE_CHECKING:
    from moe_conformance.chapters.training.parity import Compared, Row
    from moe_conformance.contract import Backend
    from moe_conformance.engine import Engine
    from moe_conformance.plugin.options import Options


@main.command(name="parity")
@with_options(("backend", "library", "ranks", "deadline"))
@click.option(
    "--format", "form", type=click.Choice(["text", "markdown", "json"]), default="text", help="(default: text)"
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="output file (default: standard output, to which a library may print too)",
)
def parity_(form: str, output: Path | None, **given: str | None) -> NoReturn:
    """Say how far loss, norm, gradients, parameters and moments are from those of one device, on every layout.

    A number is the largest error over what rounding allows: up to 1 a layout trains as one device does.

    Exit status: 0 if every number is within 1, 1 if one is not, if something failed or nothing was compared, 2 if the
    command cannot run.
    """
    require_torch()
    import torch

    from moe_conformance.chapters.training.parity import ROWS
    from moe_conformance.engine import Engine, EngineError
    from moe_conformance.plugin.run import engine_needs, open_backend
    from moe_conformance.report import parity

    sys.path.append(os.getcwd())  # as in `run`
    torch.set_num_threads(1)  # the oracles' tensors are tiny
    try:
        chosen = options.from_mapping(given)
        backend, versions = open_backend(chosen.backend, chosen.library)
        with Engine(**engine_needs(backend)) as engine:
            rows = [(row, _compared(engine, backend, chosen, row)) for row in ROWS]
    except (options.Unusable, EngineError) as error:
        raise CannotRun(str(error)) from error
    command = shlex.join(["moe-conformance", *sys.argv[1:]])
    table = parity.Table(chosen.backend, versions, chosen.ranks, command, rows)
    if form == "text":
        width, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding or "ascii"
        shown = parity.text(table, width=width, encoding=encoding)
    else:
        shown = parity.markdown(table) if form == "markdown" else parity.to_json(table)
    if output is None:
        click.echo(shown)
    else:
        try:
            output.write_text(f"{shown}\n", encoding="utf-8")
        except OSError as error:
            raise CannotRun(f"the table cannot be written: {error}") from error
    sys.exit(int(not table.held))


def _compared(engine: Engine, backend: Backend, chosen: Options, row: Row) -> Compared:
    """Run the scripts of a row, and judge them; where all are refused, the first other one that is not."""
    from moe_conformance.chapters.training.parity import Compared, others
    from moe_conformance.workloads.selection.profiles import too_large

    large = too_large(row.layout, chosen.ranks)
    found = Compared.nothing(row.why or large or "")
    if large:
        return found
    for name in row.scripts:
        _run(engine, backend, chosen, row, name, found)
    for name in others(row):
        if found.empty:
            _run(engine, backend, chosen, row, name, found)
    return found


def _run(engine: Engine, backend: Backend, chosen: Options, row: Row, name: str, found: Compared) -> None:
    """Run a script in the first variant that does not refuse it; a trainer does not depend on the exchange."""
    from moe_conformance.chapters.training.workloads import script
    from moe_conformance.reproducing.examining import refusal_of
    from moe_conformance.scenarios.moe_step import moe_step
    from moe_conformance.workloads.records.features import broken

    reasons = []
    for variant in backend.variants:
        workload = script(name, row.layout).through(variant)
        limit = broken(backend.limits(variant), workload, "cpu")
        if limit is not None:
            reasons.append(f"limit on {limit.on}: {limit.reason}")
            continue
        outcome = moe_step(engine, chosen.backend, workload, chosen.deadline)
        refusal = refusal_of(outcome)
        if refusal is None:
            found.add(name, outcome)
            return
        reasons.append(refusal[1])
    found.leave_out(name, "; ".join(dict.fromkeys(reasons)))
