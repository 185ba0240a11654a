"""`merge`, `compare`, `page`, `floor` and `table`: commands that read reports."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from moe_conformance.cli.base import CannotRun, Terminal, child, main, require_torch

if TYPE_CHECKING:
    from moe_conformance.report.result import Report


@main.command(name="merge")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@click.option("--report", required=True, type=click.Path(path_type=Path), metavar="DIR", help="folder for result.json")
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="DIR", help="fail if less passes than in the report there"
)
def merge_(folders: tuple[Path, ...], report: Path, against: Path | None) -> NoReturn:
    """Put the reports of shards, or of a stopped run and its continuation, together. Exit status as of a run."""
    from moe_conformance import spec
    from moe_conformance.report import merge, result, summary
    from moe_conformance.report.folder import Hold, InUse

    if report.resolve() in [folder.resolve() for folder in folders]:
        raise CannotRun(f"{report} is one of the reports to be merged; give another --report")
    try:
        parts, command = [merge.read(folder) for folder in folders], shlex.join(["moe-conformance", *sys.argv[1:]])
        merged = merge.merge(parts, command, None if against is None else result.read(against))
        report.mkdir(parents=True, exist_ok=True)
        hold = Hold(report)
        written = result.write(report, result.document(merged.head, tuple(spec.load().values()), merged.records))
        hold.release()
    except (merge.Unmergeable, result.NoReport, InUse, OSError) as error:
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
    """Compare the reports in two folders: new failures, what is mended, no longer judged, fewer passes, larger errors.

    Exit status: 1 if something fails or is not judged in NEW that passed or was judged in OLD, or fewer cases of it
    pass; 2 if there is no report.
    """
    from moe_conformance.report import comparison, result

    try:
        before, after = (result.read(folder) for folder in (old, new))
    except result.NoReport as error:
        raise CannotRun(str(error)) from error
    found = comparison.of_reports(before, after)
    click.echo(json.dumps(found.to_json(), indent=1) if as_json else "\n".join(found.lines()))
    sys.exit(int(found.regressed))


@main.command(name="page")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--against", metavar="DIR", type=click.Path(path_type=Path), help="show what differs from this report")
def page_(folder: Path, against: Path | None) -> None:
    """Write report.html beside the result.json in a folder: one file, for a browser, without a network."""
    from moe_conformance.report import comparison, page, result

    try:
        report = result.read(folder)
        before = None if against is None else result.read(against)
    except result.NoReport as error:
        raise CannotRun(str(error)) from error
    changes = None if before is None else comparison.of_reports(before, report)
    click.echo(f"written: {page.write(folder, report, changes)}")


@main.command(name="floor")
@click.option("--backend", required=True, metavar="NAME", help="a registered backend")
@click.option(
    "--report", type=click.Path(path_type=Path), metavar="DIR", help="of a whole quick run; without it, one is made"
)
def floor_(backend: str, report: Path | None) -> None:
    """Write how much of a backend passes as its floor, below which no later run may fall. Review it before you commit.

    It is of the versions, the device and the profile of the report. Select the cases first (`tools.select_cases`): a
    report with workloads that no selection knows is refused.
    """
    require_torch()
    from moe_conformance.report import floor, floor_file, result
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
    whole = not (head["filtered"] or head["shard"] or head["interrupted"]) and head["profile"] in ("quick", "full")
    if head["backend"] != backend or head["plant"] or not whole or head["ranks"] < floor.RANKS:
        raise CannotRun(f"a floor needs a whole run of {backend} in the profile quick or full, on {floor.RANKS} ranks")
    if unknown := _not_selected(found):
        raise CannotRun(
            f"the stored selection does not know {len(unknown)} workloads, such as {unknown[0]}: run `python -m "
            f"tools.select_cases`, for native and for {backend}, then the run again"
        )
    try:
        path = floor_file.path_to_write(backend, head["versions"], head["device"], head["profile"])
        path.write_text(floor_file.text(standings(found.records), layout_names(), head), encoding="utf-8")
    except (floor_file.Unreadable, OSError) as error:
        raise CannotRun(str(error)) from error
    failed = "; the run failed, and what failed is not held" if head["exit"] else ""
    click.echo(f"written: {path}; look at the difference before you commit it{failed}")


def _not_selected(report: Report) -> list[str]:
    """Return the workloads of a report that no selection knows, sorted: until one does, they run wherever they can."""
    from moe_conformance.workloads.selection import stored

    head = report.head
    known = stored.of(head["backend"], head["variants"]).known
    return sorted({record.workload for record in report.records if record.workload} - known)


@main.command(name="table")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="output file (default: standard output)"
)
def table_(folders: tuple[Path, ...], output: Path | None) -> None:
    """Make the table exchange x layout x (forward, backward, ...) of the reports of runs, profile by profile."""
    from moe_conformance.report import exchange_table, merge

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
