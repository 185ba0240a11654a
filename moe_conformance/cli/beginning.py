"""`list`, `explain`, `doctor` and `new`: what can be run here, and a template of an adapter."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import NoReturn

import click

from moe_conformance.cli.base import CannotRun, main, require_torch
from moe_conformance.plugin import options


@main.command(name="list")
@click.argument("what", type=click.Choice(["requirements", "checks", "backends", "surfaces", "pairs"]))
@click.option("--importable", is_flag=True, help="only backends whose library is here")
@click.option(
    "--native-only",
    is_flag=True,
    help="only requirements that no real library was judged by: its floor and waivers do not name them",
)
@click.option("--surface", metavar="NAME", help="of `list pairs`: the options and rules of one surface")
def list_(what: str, importable: bool, native_only: bool, surface: str | None) -> None:
    """List requirements, checks, backends, the optional surfaces that an adapter may offer, or pairs of options.

    `list pairs` says of each surface how many pairs of values of two options (three of a router) are possible, have a
    workload that the quick profile runs, or one that the rotation runs, and how many a rule excludes.
    """
    if importable and what != "backends":
        raise click.UsageError("--importable goes with `list backends`")
    if native_only and what != "requirements":
        raise click.UsageError("--native-only goes with `list requirements`")
    if surface and what != "pairs":
        raise click.UsageError("--surface goes with `list pairs`")
    require_torch()
    from moe_conformance.cli import catalogue

    if what == "pairs":
        try:
            for line in catalogue.pair_lines(surface):
                click.echo(line)
        except LookupError as error:
            raise CannotRun(str(error.args[0])) from error
        return
    if what == "requirements":
        lines = catalogue.native_only_lines() if native_only else catalogue.requirement_lines()
    elif what == "checks":
        lines = catalogue.check_lines()
    elif what == "surfaces":
        lines = catalogue.surface_lines()
    else:
        lines = catalogue.backend_lines(importable)
    for line in lines:
        click.echo(line)


@main.command(name="explain")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def explain_(ids: tuple[str, ...]) -> None:
    """Say what a requirement demands, where its checks, oracles, native code, planted bugs and findings are.

    An oracle is shown where a check compares its result; and which real libraries were judged, in which versions.
    """
    from moe_conformance import spec
    from moe_conformance.cli.explaining import explain
    from moe_conformance.spec.places import Places

    if unknown := [requirement for requirement in ids if requirement not in spec.load()]:
        raise CannotRun(f"no requirement {', '.join(unknown)}; `moe-conformance list requirements` shows all of them")
    places = Places()
    for number, requirement in enumerate(ids):
        if number:
            click.echo()
        for line in explain(requirement, places):
            click.echo(line)


@main.command(name="doctor")
@click.option("--ranks", metavar="N", help="the largest world that you mean to run (default: 4)")
@click.option("--backend", metavar="NAME|pkg.mod:Class", help="say what a backend offers, maps and refuses")
@click.option(
    "--library", metavar="PATH", help="with --backend: a checkout of its library, in place of the installed one"
)
@click.option("--drill", is_flag=True, help="cause every kind of rank failure in the engine (--ranks 2,4: twice)")
@click.option("--times", metavar="N", type=click.IntRange(1), default=1, help="how often, with --drill (default: 1)")
def doctor_(ranks: str | None, backend: str | None, library: str | None, drill: bool, times: int) -> NoReturn:
    """Say what this machine can run, and why not the rest; of a backend, which surfaces and options it offers.

    Of a backend one run of each kind is made too, since what can be built may fail when it is called.

    Exit status: 2 if ranks or the backend cannot start, 1 if anything of the drill went wrong, or if the backend offers
    nothing or fails with what is no refusal.
    """
    require_torch()
    from moe_conformance.cli import doctor

    if library and not backend:
        raise click.UsageError("--library goes with --backend")
    if drill:
        sys.exit(doctor.drill(_worlds("2,4" if ranks is None else ranks), times, click.echo))
    try:
        wanted = options.from_mapping({"ranks": ranks}).ranks
    except options.Unusable as error:
        raise CannotRun(str(error)) from error
    if backend is None:
        sys.exit(doctor.examine(wanted, click.echo))
    from moe_conformance.cli import backend_report
    from moe_conformance.engine import EngineError
    from moe_conformance.plugin.run import open_backend

    sys.path.append(os.getcwd())  # as in `run`
    try:
        found, versions = open_backend(backend, library or "")
        sys.exit(backend_report.examine(backend, found, dict(versions), wanted, click.echo))
    except (options.Unusable, EngineError) as error:
        raise CannotRun(str(error)) from error


def _worlds(ranks: str) -> list[int]:
    worlds = [int(word) for word in ranks.split(",") if word.isdigit()]
    if len(worlds) < len(ranks.split(",")) or any(world < 2 or world % 2 for world in worlds):
        raise CannotRun(f"--drill needs even numbers of ranks such as 2,4, not {ranks!r}")
    return sorted(set(worlds))


_LIBRARIES = {"exchange": "my_library.py", "layer": "my_layer_library.py", "router": "my_router_library.py"}


@main.command(name="new")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--layer", "kind", flag_value="layer", help="of a whole layer: router, exchange and experts in one")
@click.option("--router", "kind", flag_value="router", help="of a router")
def new_(file: Path, kind: str | None) -> None:
    """Write an adapter of an exchange (or --layer, --router) into FILE, and beside it the small library that it adapts.

    It passes as it is: replace the library by yours, a part at a time.
    """
    from importlib.resources import files

    library = _LIBRARIES[kind or "exchange"]
    written = {file: "my_adapter.py", file.with_name(library): library}
    if file.suffix != ".py" or not file.stem.isidentifier() or file.name == library:
        raise CannotRun(f"{file} cannot be imported as a module of its own; give a name such as my_adapter.py")
    if there := [str(path) for path in written if path.exists()]:
        raise CannotRun(f"{', '.join(there)} exists; give another folder or name")
    for path, name in written.items():
        text = (files("moe_conformance") / "templates" / (kind or "exchange") / name).read_text(encoding="utf-8")
        try:
            path.write_text(text.replace("my_adapter", file.stem), encoding="utf-8")
        except OSError as error:
            raise CannotRun(f"{path} cannot be written: {error}") from error
    where = "" if file.parent == Path() else f"cd {shlex.quote(str(file.parent))} && "
    click.echo(f"written: {', '.join(map(str, written))}; now run")
    click.echo(f"    {where}moe-conformance doctor --backend {file.stem}:Backend")
    click.echo(f"    {where}moe-conformance run --backend {file.stem}:Backend --ranks 4")
