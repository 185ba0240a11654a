"""`merge`, `compare`, `page`, `floor` and `table`: commands that read reports."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import click

from moe_conformance.cli.base import CannotRun, Terminal, child, main, require_torch


@main.command(name="merge")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@click.option("--report", required=True, type=click.Path(path_type=Path), metavar="DIR", help="folder for result.json")
def merge_(folders: tuple[Path, ...], report: Path) -> NoReturn:
    """Put the reports of shards, or of a stopped run and its continuation, together. Exit status as of a run."""
    from moe_conformance import spec
    from moe_conformance.report import merge, result, summary
    from moe_conformance.report.folder import Hold, InUse

    if report.resolve() in [folder.resolve() for folder in folders]:
        raise CannotRun(f"{report} is one of the reports to be merged; give another --report")
    try:
        merged = merge.merge([merge.read(folder) for folder in folders], shlex.join(["moe-conformance", *sys.argv[1:]]))
        report.mkdir(parents=True, exist_ok=True)
        hold = Hold(report)
        written = result.write(report, result.document(merged.head, tuple(spec.load().values()), merged.records))
        hold.release()
    except (merge.Unmergeable, InUse, OSError) as error:
        raise CannotRun(str(error)) from error
    width, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding or "ascii"
    terminal = Terminal(width)
    summary.write(terminal, merged.head, merged.records, width=width, color=sys.stdout.isatty(), encoding=encoding)
    for line in (*merged.notes, f"report: {written}"):
        terminal.write_line(line)
    sys.exit(merged.head["exit"])


@main.command(name="compare")
@click.argument("old", metavar="OLD", type=click.Path(path_type=Path))
@click.argument("new", metavar="NEW", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def compare_(old: Path, new: Path, as_json: bool) -> NoReturn:
    """Compare the reports in two folders: new failures, what is mended, no longer judged, errors that grew.

    Exit status: 1 if something fails or is not judged in NEW that passed or was judged in OLD, 2 if there is no report.
    """
    from moe_conformance.report import comparison, result
    from moe_conformance.report.standing import standings

    try:
        before, after = (result.read(folder) for folder in (old, new))
    except result.NoReport as error:
        raise CannotRun(str(error)) from error
    whole = not (after.head["filtered"] or after.head["shard"]) and after.head["ranks"] >= before.head["ranks"]
    found = comparison.compare(standings(before.records), standings(after.records), whole=whole)
    click.echo(json.dumps(found.to_json(), indent=1) if as_json else "\n".join(found.lines()))
    sys.exit(int(found.regressed))


@main.command(name="page")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--against", metavar="DIR", type=click.Path(path_type=Path), help="show what differs from this report")
def page_(folder: Path, against: Path | None) -> None:
    """Write report.html beside the result.json in a folder: one file, for a browser, without a network."""
    from moe_conformance.report import comparison, page, result
    from moe_conformance.report.standing import standings

    try:
        report = result.read(folder)
        before = None if against is None else result.read(against)
    except result.NoReport as error:
        raise CannotRun(str(error)) from error
    changes = None
    if before is not None:
        whole = not (report.head["filtered"] or report.head["shard"]) and report.head["ranks"] >= before.head["ranks"]
        changes = comparison.compare(standings(before.records), standings(report.records), whole=whole)
    click.echo(f"written: {page.write(folder, report, changes)}")


@main.command(name="floor")
@click.option("--backend", required=True, metavar="NAME", help="a registered backend")
@click.option(
    "--report", type=click.Path(path_type=Path), metavar="DIR", help="of a whole quick run; without it, one is made"
)
def floor_(backend: str, report: Path | None) -> None:
    """Write what a backend passes as its floor, below which no later run may fall. Review it before it is committed."""
    require_torch()
    from moe_conformance.report import floor, result
    from moe_conformance.report.standing import standings
    from moe_conformance.workloads.scripts import layout_names

    with tempfile.TemporaryDirectory() as made:
        if report is None:
            child([sys.executable, "-m", "moe_conformance.cli", "run", "--backend", backend, "--report", made])
        try:
            found = result.read(report or Path(made))
        except result.NoReport as error:
            raise CannotRun(str(error)) from error
    head = found.head
    whole = not (head["filtered"] or head["shard"] or head["interrupted"]) and head["profile"] == "quick"
    if head["backend"] != backend or not whole or head["ranks"] != floor.RANKS:
        raise CannotRun(f"a floor needs the whole quick profile of {backend} on {floor.RANKS} ranks")
    path = floor.path_to_write(backend, head["versions"])
    text = floor.text(standings(found.records), layout_names(), head["versions"])
    path.write_text(text, encoding="utf-8")
    click.echo(f"written: {path}; look at the difference before you commit it")


@main.command(name="table")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="output file (default: standard output)"
)
def table_(folders: tuple[Path, ...], output: Path | None) -> None:
    """Make the table exchange x layout x (forward, backward, ...) of the reports of runs, profile by profile."""
    from moe_conformance.report import exchange_table, merge
    from moe_conformance.report.result import Report

    command = shlex.join(["moe-conformance", *sys.argv[1:]])
    try:
        parts = [merge.read(folder) for folder in folders]
        merge.of_one_backend(parts)
        by_profile: dict[str, list[Report]] = {}
        for part in parts:
            by_profile.setdefault(part.head["profile"], []).append(part)
        sections = []
        for of_profile in by_profile.values():
            whole = merge.merge(of_profile, command)
            sections.append(
                exchange_table.Section(whole.head, whole.records, [part.head["command"] for part in of_profile])
            )
        page = exchange_table.page(command, sections)
        if output is None:
            click.echo(page, nl=False)
        else:
            output.write_text(page, encoding="utf-8")
    except merge.Unmergeable as error:
        raise CannotRun(str(error)) from error
    except OSError as error:
        raise CannotRun(f"the table cannot be written: {error}") from error
