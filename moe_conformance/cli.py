"""The command line: `moe-conformance run`, `merge`, `compare`, `floor`, `table`, `list`, `explain` and `doctor`.

`run` is pytest on the installed checks, no more. What needs torch is imported by the command that needs it, so that
`--help` does not wait for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import pytest

from moe_conformance.plugin import collecting, launching, options

EVERY = "every-importable"

# The caller's pytest configuration stays out, and our reporter does the telling.
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

Command = TypeVar("Command", bound=Callable[..., Any])


class CannotRun(click.ClickException):
    """The command cannot run here; one sentence with the remedy."""

    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moe-conformance")
def main() -> None:
    """Drives an implementation of Mixture-of-Experts parallelism on real ranks and judges what it did."""


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise CannotRun("torch is not installed here; install the build that this machine needs, 2.6 or newer")


def _options(names: Collection[str]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed([option for option in options.OPTIONS if option.name in names]):
            own: dict[str, Any] = {"metavar": option.metavar, "multiple": option.lists, "callback": _joined}
            if option.flag:
                own = {"is_flag": True, "default": None}
            decorator = click.option(f"--{option.name}", help=option.help, **own)
            command = decorator(command)
        return command

    return decorate


def _joined(context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...] | None) -> str | None:
    """Return the values of an option that may be given several times as one."""
    return (",".join(value) or None) if isinstance(value, tuple) else value


@main.command()
@_options([option.name for option in options.OPTIONS])
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def run(pytest_arguments: tuple[str, ...], **given: Any) -> NoReturn:
    """Judge a backend. What follows `--` is for pytest: `-- -n 2`, `-- -x`, `-- -k alltoall-ep2`.

    Exit status: 0 if every required check passed, 1 if not, 2 if the run could not start. `--backend every-importable`
    judges every registered backend whose library is here, one after the other, each with a report folder of its own.
    """
    _require_torch()
    if not collecting.FOLDER.is_dir():
        raise CannotRun(f"there are no checks in {collecting.FOLDER}; install moe-conformance again")
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.get("backend") == EVERY:
        sys.exit(_run_every(chosen, pytest_arguments))
    sys.path.append(os.getcwd())  # an adapter by dotted path; last, so that nothing there hides what is installed
    os.environ.pop("PYTEST_ADDOPTS", None)  # meant for the caller's own tests
    asked = list(_arguments("--moe-", chosen))
    status = pytest.main([*_PYTEST, *asked, *pytest_arguments, str(collecting.FOLDER)])
    sys.exit(_STATUS.get(int(status), int(status)))


def _arguments(prefix: str, chosen: Mapping[str, str | bool]) -> Iterator[str]:
    """Yield what was chosen as arguments; a flag has no value."""
    for name, value in chosen.items():
        said = f"{prefix}{name.replace('_', '-')}"
        yield said if value is True else f"{said}={value}"


def _run_every(chosen: dict[str, str], pytest_arguments: tuple[str, ...]) -> int:
    """Judge each importable backend in a process of its own; return the worst status."""
    from moe_conformance import catalogue

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
        own = {**chosen, "backend": name}
        if "report" in chosen:
            own["report"] = str(Path(chosen["report"]) / name)
        click.echo(f"\n{name}")
        run_ = [sys.executable, "-m", "moe_conformance.cli", "run"]
        command = [*run_, *_arguments("--", own), "--", *pytest_arguments]
        worst = max(worst, _child(command))
        if worst > 128:  # ended by a signal: so are we
            break
    return worst


def _child(command: list[str]) -> int:
    """Run a command and pass on what would end us; Ctrl-C reaches it from the terminal already."""
    child = subprocess.Popen(command)
    before = signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
    try:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


@main.command(name="replay")
@click.argument("example", metavar="FILE", type=click.Path(path_type=Path))
@_options(options.REPLAYED)
def replay_(example: Path, **given: str | None) -> NoReturn:
    """Run the example of a drawn failure again, from the file in which a run has left it, and judge it.

    Exit status: 0 if it passes, 1 if it fails, 2 if it could not be judged. The file is data and names no code to run:
    say which backend, as the run has printed it.
    """
    _require_torch()
    from moe_conformance.plugin.replay import replay

    sys.path.append(os.getcwd())  # as in `run`
    try:
        status = replay(example, options.from_mapping(given), click.echo)
    except options.Unusable as error:
        raise CannotRun(str(error)) from error
    sys.exit(status)


@main.command(name="list")
@click.argument("what", type=click.Choice(["requirements", "checks", "backends"]))
@click.option("--importable", is_flag=True, help="only backends whose library is here")
def list_(what: str, importable: bool) -> None:
    """List requirements, checks or backends."""
    if importable and what != "backends":
        raise click.UsageError("--importable goes with `list backends`")
    _require_torch()
    from moe_conformance import catalogue

    if what == "requirements":
        lines = catalogue.requirement_lines()
    elif what == "checks":
        lines = catalogue.check_lines()
    else:
        lines = catalogue.backend_lines(importable)
    for line in lines:
        click.echo(line)


@main.command(name="explain")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def explain_(ids: tuple[str, ...]) -> None:
    """Say what a requirement demands, and where its checks, oracles, native code, planted bugs and findings are."""
    from moe_conformance import spec
    from moe_conformance.explaining import explain
    from moe_conformance.spec.places import Places

    if unknown := [each for each in ids if each not in spec.load()]:
        raise CannotRun(f"no requirement {', '.join(unknown)}; `moe-conformance list requirements` shows all of them")
    places = Places()
    for number, each in enumerate(ids):
        if number:
            click.echo()
        for line in explain(each, places):
            click.echo(line)


@main.command(name="doctor")
@click.option("--ranks", metavar="N", help="the largest world that you mean to run (default: 4)")
@click.option("--backend", metavar="NAME|pkg.mod:Class", help="say what a backend offers, maps and refuses")
@click.option("--drill", is_flag=True, help="cause every kind of rank failure in the engine (--ranks 2,4: twice)")
@click.option("--times", metavar="N", type=click.IntRange(1), default=1, help="how often, with --drill (default: 1)")
def doctor_(ranks: str | None, backend: str | None, drill: bool, times: int) -> NoReturn:
    """Say what this machine can run, and why not the rest; of a backend, which surfaces and options it offers.

    Exit status: 2 if ranks or the backend cannot start, 1 if anything of the drill went wrong, or if the backend offers
    nothing or fails with what is no refusal.
    """
    _require_torch()
    from moe_conformance import doctor

    if drill:
        sys.exit(doctor.drill(_worlds("2,4" if ranks is None else ranks), times, click.echo))
    try:
        wanted = options.from_mapping({"ranks": ranks}).ranks
    except options.Unusable as error:
        raise CannotRun(str(error)) from error
    if backend is None:
        sys.exit(doctor.examine(wanted, click.echo))
    from moe_conformance import backend_report
    from moe_conformance.engine import EngineError
    from moe_conformance.plugin.run import open_backend

    sys.path.append(os.getcwd())  # as in `run`
    try:
        found, versions = open_backend(backend)
        sys.exit(backend_report.examine(backend, found, dict(versions), wanted, click.echo))
    except (options.Unusable, EngineError) as error:
        raise CannotRun(str(error)) from error


def _worlds(ranks: str) -> list[int]:
    worlds = [int(word) for word in ranks.split(",") if word.isdigit()]
    if len(worlds) < len(ranks.split(",")) or any(world < 2 or world % 2 for world in worlds):
        raise CannotRun(f"--drill needs even numbers of ranks such as 2,4, not {ranks!r}")
    return sorted(set(worlds))


@main.command(name="new")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--layer", "kind", flag_value="layer", help="of a whole layer: router, exchange and experts in one")
@click.option("--router", "kind", flag_value="router", help="of a router")
def new_(file: Path, kind: str | None) -> None:
    """Write an adapter of an exchange (or --layer, --router) into FILE, and my_library.py, which it adapts, beside it.

    It passes as it is: replace the library by yours, a part at a time.
    """
    from importlib.resources import files

    written = {file: "my_adapter.py", file.with_name("my_library.py"): "my_library.py"}
    if file.suffix != ".py" or not file.stem.isidentifier() or file.name == "my_library.py":
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


@main.command(name="merge")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@click.option("--report", required=True, type=click.Path(path_type=Path), metavar="DIR", help="folder for result.json")
def merge_(folders: tuple[Path, ...], report: Path) -> NoReturn:
    """Put the reports of shards, or of a stopped run and its continuation, together. Exit status as of a run."""
    from moe_conformance import spec
    from moe_conformance.report import merge, result, summary

    if report.resolve() in [folder.resolve() for folder in folders]:
        raise CannotRun(f"{report} is one of the reports to be merged; give another --report")
    try:
        merged = merge.merge([merge.read(folder) for folder in folders], shlex.join(["moe-conformance", *sys.argv[1:]]))
        report.mkdir(parents=True, exist_ok=True)
        written = result.write(report, result.document(merged.head, tuple(spec.load().values()), merged.records))
    except (merge.Unmergeable, OSError) as error:
        raise CannotRun(str(error)) from error
    width, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding or "ascii"
    terminal = _Terminal(width)
    summary.tell(terminal, merged.head, merged.records, width=width, color=sys.stdout.isatty(), encoding=encoding)
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
    _require_torch()
    from moe_conformance.plan import layout_names
    from moe_conformance.report import floor, result
    from moe_conformance.report.standing import standings

    with tempfile.TemporaryDirectory() as made:
        if report is None:
            _child([sys.executable, "-m", "moe_conformance.cli", "run", "--backend", backend, "--report", made])
        try:
            found = result.read(report or Path(made))
        except result.NoReport as error:
            raise CannotRun(str(error)) from error
    head = found.head
    whole = not (head["filtered"] or head["shard"] or head["interrupted"]) and head["profile"] == "quick"
    if head["backend"] != backend or not whole or head["ranks"] != floor.RANKS:
        raise CannotRun(f"a floor needs the whole quick profile of {backend} on {floor.RANKS} ranks")
    path = floor.FOLDER / f"{backend}.toml"
    path.write_text(floor.text(standings(found.records), layout_names()), encoding="utf-8")
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
        for own in by_profile.values():
            whole = merge.merge(own, command)
            sections.append(exchange_table.Section(whole.head, whole.records, [part.head["command"] for part in own]))
        page = exchange_table.page(command, sections)
        if output is None:
            click.echo(page, nl=False)
        else:
            output.write_text(page, encoding="utf-8")
    except merge.Unmergeable as error:
        raise CannotRun(str(error)) from error
    except OSError as error:
        raise CannotRun(f"the table cannot be written: {error}") from error


class _Terminal:
    """What the summary of a run is written on, outside of pytest."""

    def __init__(self, width: int) -> None:
        self._width = width

    def write_line(self, line: str, **markup: bool) -> None:
        """Write a line."""
        click.secho(line, fg="red" if markup.get("red") else None)

    def write_sep(self, sep: str, title: str | None = None, fullwidth: int | None = None, **markup: bool) -> None:
        """Write a title in a rule."""
        self.write_line(f" {title} ".center(fullwidth or self._width, sep), **markup)


if __name__ == "__main__":
    main()
