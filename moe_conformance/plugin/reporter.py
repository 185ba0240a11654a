"""The reporter: collects the records of all items, those of xdist workers too, and sets the exit status."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from moe_conformance import spec
from moe_conformance.plugin import agenda, roster, run
from moe_conformance.plugin.case_items import checks_of_items
from moe_conformance.plugin.driver import Driver
from moe_conformance.plugin.scripts import Scripts
from moe_conformance.plugin.stopping import Stopping
from moe_conformance.report import not_run, problems, result, summary
from moe_conformance.report.comparison import compare
from moe_conformance.report.floor import elsewhere
from moe_conformance.report.floor_file import of_backend
from moe_conformance.report.journal import Journal
from moe_conformance.report.live import Live
from moe_conformance.report.progress import Progress
from moe_conformance.report.records import FAILING, FOLLOWS, PROPERTY, Record, all_of_report, of_report
from moe_conformance.report.standing import Place, places, standings
from moe_conformance.workloads.plan import SMOKE

_LETTERLESS = ""  # the progress line stands for pytest's letters
_CATEGORIES = {"pass": "passed", "error": "suite error"}  # pytest prints those under "error" a second time
_WIDE = 200  # columns where there is no terminal to fit


class Reporter:
    """The part of the plug-in that reports; it exists where pytest reports, not in xdist workers."""

    def __init__(self, driver: Driver, stopping: Stopping, config: pytest.Config) -> None:
        """Report the run of a driver."""
        self._driver, self._run, self._stopping, self._config = driver, driver.run, stopping, config
        self._collected = False
        self._roster: roster.Roster = {}
        self._records: list[Record] = []
        self._head: dict[str, Any] | None = None
        self._written: Path | None = None
        self._progress: Progress | None = None
        self._journal: Journal | None = None
        self._live = Live(driver.run.options.again)
        self._scripts = Scripts(driver.run)
        self._lost = ""  # why what there is to report could not be written

    # ---- while it runs -----------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self) -> None:
        """Record that collection succeeded: after a wrong argument pytest calls the next hook too."""
        self._collected = True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Begin the report with all items: the time limit may end the run before the first of them."""
        if self._collected and not self._config.option.collectonly:
            self._roster = roster.roster(session.items)
            self._open()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Begin the report where workers collect; show progress by case in place of pytest's, which is by file."""
        if self._config.option.collectonly:
            return
        self._open()
        terminal = self._terminal
        if terminal is None:
            return
        self._driver.outcomes.notice = lambda sentence: self._print([sentence])
        terminal.showfspath = False
        if terminal.verbosity > 0:
            return  # pytest tells every item itself
        total = sum(1 for _ in checks_of_items(session.items))
        if terminal.isatty:
            columns = shutil.get_terminal_size().columns
            self._progress = Progress.on_terminal(terminal.rewrite, columns, total)
        else:
            self._progress = Progress.in_log(terminal.write_line, total)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: list[Any]) -> None:
        """Print the GPUs of every worker's ranks: those that share one do not communicate over NCCL."""
        if self._run.options.device == "cuda" and self._terminal is not None:
            for sentence in run.gpu_sentences(len(specs)):
                self._terminal.write_line(sentence)

    def collected(self, node: Any, ids: list[str]) -> None:
        """Take the roster of items from an xdist worker: the controller collects none itself."""
        self._open()
        if taken := roster.take(node.workerinput):
            self._roster, in_part = taken
            self._driver.in_part |= in_part
        if self._progress is not None:
            self._progress.total = len(self._roster) or len(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Add the record to the report that xdist makes of an item that ended with its worker."""
        entry = roster.running(self._roster, crashitem, {record.node for record in self._records})
        if entry is not None:
            report.nodeid = entry.node  # --lf takes it from there
            report.user_properties.append((PROPERTY, roster.lost(entry)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Return the category of an item, which is its verdict."""
        record = of_report(report.user_properties)
        if record is None:
            return None
        return (_CATEGORIES.get(record.verdict, record.verdict), _LETTERLESS, record.verdict.upper())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the item's records, and print a failure at once."""
        records = list(all_of_report(report.user_properties))
        if records and self._journal is not None:
            with self._writing():
                self._journal.write(records)
        self._records += records
        follows = any(name == FOLLOWS for name, _ in report.user_properties)
        for record in records:
            script = None
            with self._writing():
                script = self._scripts.write(record)
            self._print(() if follows else self._live.lines(record, str(script or "")))
            if self._progress is not None:
                self._progress.step(record.case or record.check, failed=record.verdict in FAILING, runs=record.runs)

    def _print(self, lines: Sequence[str]) -> None:
        """Print a failure: the first line in red."""
        terminal = self._terminal
        if not lines or terminal is None:
            return
        if self._progress is not None:
            self._progress.clear()
        for number, line in enumerate(["", *lines]):
            terminal.write_line(line, red=number == 1)

    # ---- at the end --------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)  # before ranks and workers are ended, which can take a while
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a run in which nothing passed or a waiver is wrong; write result.json."""
        if self._config.option.collectonly or exitstatus == pytest.ExitCode.USAGE_ERROR:
            return
        self._open()  # if the session ends in what comes before its items
        stopped = ""
        interrupted = exitstatus not in (0, 1, 5)
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            stopped, exitstatus = self._stopping.reason, self._stopping.status
        found = tuple(self._problems(interrupted or bool(session.shouldfail)))  # -x leaves most of it out
        found += (self._lost,) if self._lost else ()
        if found and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            exitstatus = pytest.ExitCode.TESTS_FAILED
        session.exitstatus = exitstatus
        facts = replace(
            self._facts(),
            finished=datetime.now(UTC),
            exit=int(exitstatus),
            cases=sum(record.runs for record in self._records),
            problems=found,
            interrupted=interrupted,
            stopped=stopped,
        )
        self._head = result.head(facts)
        ended = {record.node for record in self._records}
        why = f"not run: {facts.stopped}" if facts.stopped else "not run"
        missed = [replace(entry, message=why) for node, entry in self._roster.items() if node not in ended]
        self._records += not_run.folded(missed)
        if self._journal is not None:
            self._end(session)

    def _end(self, session: pytest.Session) -> None:
        """Write the whole report; a run that cannot be reported fails, and keeps the records that were written."""
        assert self._head is not None
        assert self._journal is not None
        lost = self._lost
        with self._writing():
            self._written = self._write(self._head, self._records)
            self._journal.delete()
        if self._lost and not lost:
            self._head["problems"].append(self._lost)
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep why something could not be written, such as a full disk: it fails the run at its end."""
        try:
            yield
        except OSError as error:
            self._lost = f"the report cannot be written into {self._run.options.report}: {error.strerror or error}"

    def _open(self) -> None:
        """Write a first report, which is true if this process is killed; end the session where that is not possible."""
        folder = self._run.options.report
        if not folder or self._journal is not None:
            return
        with self._writing():
            self._journal = Journal(Path(folder))
            self._write(result.head(self._facts()), [])
        if self._lost:
            pytest.exit(self._lost, returncode=int(pytest.ExitCode.USAGE_ERROR))

    def _write(self, head: dict[str, Any], records: Sequence[Record]) -> Path:
        content = result.document(head, tuple(spec.load().values()), records)
        return result.write(Path(self._run.options.report), content)

    def _facts(self) -> result.Facts:
        """Return the facts that are known from the beginning."""
        options, other = self._run.options, self._driver.other_cells
        loads = agenda.loads(self._driver.plan, options.ranks) if other else {}
        return result.Facts(
            backend=self._run.target,
            versions=self._run.versions,
            device=options.device,
            ranks=options.ranks,
            profile=options.profile,
            plant=options.plant,
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            again=options.again,
            started=self._run.started,
            strict=options.strict,
            filtered=self._filtered(),
            only=options.ids,
            shard=options.shard,
            left_out={"cells": sorted(filter(None, other)), "cases": sum(loads[cell] for cell in other)},
            waivers=self._run.waivers.held,
            variants=tuple(self._run.backend.variants),
            single_rank=self._single_rank,
        )

    def _problems(self, interrupted: bool) -> Iterator[str]:
        """Yield what fails the run in addition to its items; for a shard only what no other shard can correct."""
        held, options = self._run.waivers, self._run.options
        yield from held.problems
        if not interrupted and not options.shard:
            full, narrowed = options.profile == "full", self._filtered()
            spread = options.ranks > 1 and self._run.floor is None and not self._single_rank
            yield from problems.of_whole(
                self._records, held, filtered=narrowed, full=full, strict=options.strict, spread=spread
            )
        if not interrupted:
            yield from self._regressions()

    def _regressions(self) -> Iterator[str]:
        """Yield what passed by the floor, or in the run to compare with, and does not pass now.

        A run of files or of node ids is compared with neither: it does not have all items of its places. A shard is
        compared in all places of its cells, which no other shard has.
        """
        if self._of_parts():
            return
        options, held, old = self._run.options, self._run.floor, self._run.against
        run = places([*self._roster.values(), *self._records]) - self._driver.in_part
        if options.ids:  # checks of these decide other requirements too, of which other checks did not run
            run = {place for place in run if place[0] in options.ids}
        found = standings(self._records)
        if held is not None and options.profile in ("quick", "full") and not options.rotation:
            selected = self._selected_items() or held.profile != options.profile
            yield from held.sentences(found, run if selected else self._here(held.places))
        if old is not None:
            narrowed = self._filtered() or options.shard or options.ranks < old.head["ranks"]
            new = {place: stands for place, stands in found.items() if place in run}
            counts = old.head["profile"] == options.profile and not options.rotation  # else of other cases
            compared = compare(standings(old.records), new, whole=not narrowed, counts=counts)
            if sentence := compared.sentence(options.against):
                yield sentence

    def _here(self, held: Iterable[Place]) -> set[Place]:
        """Return the places that a run by requirement and shard has to have, whether it has them or not."""
        options, others = self._run.options, self._driver.other_cells
        cells = {place: "" if place[1:] == ("any", "any") else f"{place[1]}-{place[2]}" for place in held}
        return {
            place
            for place, cell in cells.items()
            if cell not in others and (not options.ids or place[0] in options.ids)
        }

    def _selected_items(self) -> bool:
        """Whether pytest's options select among the items."""
        option = self._config.option
        return any((option.keyword, option.markexpr, option.deselect, option.maxfail))

    def _filtered(self) -> bool:
        """Whether only a part of the selection was requested; a shard is not such a part."""
        options = self._run.options
        chosen = bool(options.ids or options.rotation or options.profile == SMOKE)
        return chosen or self._selected_items() or self._of_parts()

    def _of_parts(self) -> bool:
        """Whether files or items were named, or --lf was given."""
        named = any("::" in argument or argument.endswith(".py") for argument in self._config.args)
        return named or bool(getattr(self._config.option, "lf", False))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print failures, problems, the matrix and the totals."""
        if self._head is None:
            return
        if self._progress is not None:
            self._progress.clear()
        summary.write(
            terminalreporter,
            self._head,
            self._records,
            width=shutil.get_terminal_size().columns if terminalreporter.isatty else _WIDE,
            color=terminalreporter.hasmarkup,
            encoding=sys.stdout.encoding or "ascii",
            whole=self._run.options.matrix == "all",
            propose=self._run.options.propose_waivers,
            shown_kinds=self._live.shown,
            scripts=self._scripts.written,
        )
        for line in self._of_other_versions():
            terminalreporter.write_line(line)
        if self._written is not None:
            terminalreporter.write_line(f"report: {self._written}")

    def _of_other_versions(self) -> Iterator[str]:
        """Yield which waivers and floors are not applied, since they are of other versions, or of another run."""
        options = self._run.options
        if others := self._run.waivers.elsewhere:
            yield f"waivers of other versions, not applied: {len(others)}"
        unheld = self._run.floor is None and not options.plant and options.profile != SMOKE
        if unheld and (floors := of_backend(self._run.target)):
            yield elsewhere(floors, options.device, options.profile)
        if self._run.floor is not None and self._run.floor.profile != options.profile:
            yield f"there is no floor of the profile {options.profile}: held to the places of that of quick, uncounted"

    @property
    def _single_rank(self) -> bool:
        return bool(getattr(self._run.backend, "single_rank", False))

    @property
    def _terminal(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")
