"""`run` and `replay`: run pytest on the installed checks, or a drawn example from a file."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest

from moe_conformance.cli.base import CannotRun, as_arguments, child, main, require_torch, with_options
from moe_conformance.cli.supervising import supervised
from moe_conformance.plugin import collecting, launching, options

EVERY = "every-importable"

# Without the caller's configuration of pytest; the reporter of the plug-in prints the results.
_PYTEST = (
    "-c", os.devnull, f"--rootdir={collecting.FOLDER.parent}", "--strict-markers",
    "-p", "no:cacheprovider",
    "-p", "no:logging", "--assert=plain",  # checks neither log nor assert; 2 ms per item and 1 s at the start
    "-qq", "-rN", "--no-header", "-o", "console_output_style=classic",
)  # fmt: skip

_STATUS: dict[int, int] = {
    pytest.ExitCode.USAGE_ERROR: 2,
    pytest.ExitCode.INTERRUPTED: 130,  # 128 + SIGINT, as a shell has it
    pytest.ExitCode.INTERNAL_ERROR: 1,
    pytest.ExitCode.NO_TESTS_COLLECTED: 1,
}


@main.command()
@with_options([option.name for option in options.OPTIONS])
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def run(pytest_arguments: tuple[str, ...], **given: Any) -> NoReturn:
    """Judge a backend. What follows `--` is for pytest: `-- -n 2`, `-- -x`, `-- -k alltoall-ep2`.

    Exit status: 0 if every required check passed, 1 if not, 2 if the run could not start. `--backend every-importable`
    judges every registered backend whose library is here, one after the other, each with a report folder of its own.
    """
    require_torch()
    if not collecting.FOLDER.is_dir():
        raise CannotRun(f"there are no checks in {collecting.FOLDER}; install moe-conformance again")
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("backend") == EVERY:
        sys.exit(_run_every(chosen, pytest_arguments))
    sys.path.append(os.getcwd())  # an adapter by dotted path; last, so that nothing there hides what is installed
    os.environ.pop("PYTEST_ADDOPTS", None)  # meant for the caller's own tests
    options_of_run = list(as_arguments("--moe-", chosen))
    arguments = [*_PYTEST, *options_of_run, *pytest_arguments, str(collecting.FOLDER)]
    status = supervised(lambda: int(pytest.main(arguments)))
    sys.exit(_STATUS.get(status, status))


def _run_every(chosen: dict[str, str], pytest_arguments: tuple[str, ...]) -> int:
    """Judge every importable backend in a separate process; return the largest exit status."""
    from moe_conformance.cli import catalogue

    if launching.is_launched():
        raise CannotRun(f"--backend {EVERY} is one run after the other: launch each of them under torchrun by itself")
    found = [entry.name for entry in catalogue.backends() if entry.problem is None]
    if not found:
        raise CannotRun(
            "no registered backend has its library installed; `moe-conformance doctor` says what each lacks"
        )
    click.echo(f"importable: {', '.join(found)}")
    worst = 0
    for name in found:
        options_of_backend = {**chosen, "backend": name}
        if "report" in chosen:
            options_of_backend["report"] = str(Path(chosen["report"]) / name)
        click.echo(f"\n{name}")
        run_ = [sys.executable, "-m", "moe_conformance.cli", "run"]
        command = [*run_, *as_arguments("--", options_of_backend), "--", *pytest_arguments]
        worst = max(worst, child(command))
        if worst > 128:  # ended by a signal, which ends this command too
            break
    return worst


@main.command(name="replay")
@click.argument("example", metavar="FILE", type=click.Path(path_type=Path))
@with_options(options.REPLAYED)
def replay_(example: Path, **given: str | None) -> NoReturn:
    """Run the example of a drawn failure again, from the file in which a run has left it, and judge it.

    Exit status: 0 if it passes, 1 if it fails, 2 if it could not be judged. Without `--backend` and `--plant` it is run
    on the registered backend that the file names. The file is data, and no module is imported for it: a backend that is
    given by dotted path has to be said.
    """
    require_torch()
    from moe_conformance.plugin.replay import named_backend, replay

    sys.path.append(os.getcwd())  # as in `run`
    try:
        if given["backend"] is None and given["plant"] is None:
            given["backend"] = named = named_backend(example)
            if ":" in named:
                raise CannotRun(f"{example} is of the backend {named}; add --backend {shlex.quote(named)}")
            click.echo(f"backend: {named}, as {example} says")
        status = replay(example, options.from_mapping(given), click.echo)
    except options.Unusable as error:
        raise CannotRun(str(error)) from error
    sys.exit(status)
