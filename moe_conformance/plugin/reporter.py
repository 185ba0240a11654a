"""The reporter: gathers the records of all items, those of xdist workers too, and decides how the run ends."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from moe_conformance import spec
from moe_conformance.plan import layout_names
from moe_conformance.plugin import gpus
from moe_conformance.plugin.run import Run
from moe_conformance.report import matrix, result, words
from moe_conformance.report.progress import Progress
from moe_conformance.report.records import FAILING, Record, of_report
from moe_conformance.waivers import Item, proposal

_LETTERLESS = ""  # the progress line stands for pytest's letters
_CATEGORIES = {"pass": "passed", "error": "suite error"}  # pytest tells its own "error" a second time
_WIDE = 200  # columns where there is no terminal to fit


class Reporter:
    """The plug-in's telling half; it lives where pytest reports, not in xdist workers."""

    def __init__(self, run: Run, config: pytest.Config) -> None:
        """Gather for that run."""
        self._run, self._config = run, config
        self._records: list[Record] = []
        self._facts: result.Facts | None = None
        self._written: Path | None = None
        self._interrupted = False
        self._progress: Progress | None = None

    # ---- while it runs -----------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Take over the line in which pytest would show files: items come by case, and files alternate."""
        terminal = self._terminal
        if terminal is None or self._config.option.collectonly:
            return
        terminal.showfspath = False
        if terminal.isatty and terminal.verbosity <= 0:
            self._progress = Progress(terminal.rewrite, shutil.get_terminal_size().columns, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: list[Any]) -> None:
        """Say which worker's ranks have which GPUs: it decides who shares one, and so what goes over NCCL."""
        if self._run.options.device == "cuda" and self._terminal is not None:
            for sentence in gpus.sentences(len(specs)):
                self._terminal.write_line(sentence)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Learn how many items there are: the controller collects none itself."""
        if self._progress is not None:
            self._progress.total = len(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Count an item under its verdict."""
        record = of_report(report.user_properties)
        if record is None:
            return None
        return (_CATEGORIES.get(record.verdict, record.verdict), _LETTERLESS, record.verdict.upper())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the item's record."""
        record = of_report(report.user_properties)
        if record is None:
            return
        self._records.append(record)
        if self._progress is not None:
            self._progress.step(record.case or record.check, failed=record.verdict in FAILING, runs=record.runs)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tell a person's interrupt from pytest's own, which is how it ends after errors while collecting."""
        self._interrupted = not isinstance(excinfo.value, pytest.Session.Interrupted)

    # ---- at the end --------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a run in which nothing passed or a waiver is wrong; write result.json."""
        if self._config.option.collectonly or exitstatus == pytest.ExitCode.USAGE_ERROR:
            return
        if exitstatus == pytest.ExitCode.INTERRUPTED and not self._interrupted:
            session.exitstatus = exitstatus = pytest.ExitCode.TESTS_FAILED  # by errors while collecting
        interrupted = exitstatus not in (0, 1, 5) or bool(session.shouldstop)
        problems = tuple(self._problems(interrupted))
        if problems and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = exitstatus = pytest.ExitCode.TESTS_FAILED
        options = self._run.options
        self._facts = result.Facts(
            backend=self._run.target,
            versions=self._run.versions,
            device=options.device,
            ranks=options.ranks,
            profile=options.profile,
            plant=options.plant,
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            started=self._run.started,
            finished=datetime.now(UTC),
            exit=130 if exitstatus == pytest.ExitCode.INTERRUPTED else int(exitstatus),  # as the command line has it
            cases=sum(record.runs for record in self._records),
            problems=problems,
            interrupted=interrupted,
        )
        if options.report:
            law = tuple(spec.load().values())
            content = result.document(self._facts, law, self._records)
            self._written = result.write(Path(options.report), content)

    def _problems(self, interrupted: bool) -> Iterator[str]:
        """Yield what fails the run beside its items."""
        yield from self._run.waivers.problems
        if interrupted:
            return
        if not self._filtered():
            ran = [_item(record) for record in self._records if record.verdict not in ("not applicable", "not run")]
            used = [record.waiver for record in self._records if record.verdict in ("waived", "unexpected pass")]
            yield from self._run.waivers.misnamed(record.item for record in self._records)
            whole = self._run.options.profile == "full"
            yield from self._run.waivers.unused((item for item in ran if item), used, whole)
        if not any(record.verdict == "pass" for record in self._records):
            yield "nothing passed: a run without a single passing check shows nothing"

    def _filtered(self) -> bool:
        """Whether anything but the whole selection was asked for."""
        option = self._config.option
        asked = (option.keyword, option.markexpr, option.deselect, option.maxfail, self._run.options.ids)
        parts = any("::" in argument or argument.endswith(".py") for argument in self._config.args)
        return any(asked) or parts or getattr(option, "lf", False)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Tell failures, problems, the matrix and the totals."""
        facts = self._facts
        if facts is None:
            return
        if self._progress is not None:
            self._progress.clear()
        found = words.groups(self._records)
        self._tell_failures(terminalreporter, found)
        for problem in facts.problems:
            terminalreporter.write_line(f"FAILS THE RUN: {problem}", red=True)
        law = spec.load()
        wanted = self._run.options.ids or tuple(law)
        shown = matrix.matrix(
            [law[each] for each in law if each in wanted],
            layout_names(),
            self._records,
            width=shutil.get_terminal_size().columns if terminalreporter.isatty else _WIDE,
            color=terminalreporter.hasmarkup,
            encoding=sys.stdout.encoding or "ascii",
        )
        terminalreporter.write_line("")
        terminalreporter.write(shown)
        if left_out := len(law) - len(set(wanted)):
            terminalreporter.write_line(f"{left_out} requirements not run: left out by --only")
        versions = " ".join(f"{name} {version}" for name, version in facts.versions.items())
        backend = f"native with the planted bug {facts.plant}" if facts.plant else facts.backend
        terminalreporter.write_line(f"{backend} ({versions}) on {facts.ranks} ranks, {facts.device}")
        terminalreporter.write_line(matrix.totals(self._records))
        rate = facts.cases / facts.seconds if facts.seconds else 0.0
        terminalreporter.write_line(f"{facts.cases} cases in {facts.seconds:.1f} s, {rate:.1f} cases/s")
        if self._written is not None:
            terminalreporter.write_line(f"report: {self._written}")

    def _tell_failures(self, terminal: pytest.TerminalReporter, found: list[words.Group]) -> None:
        for title, text in words.tell(found):
            terminal.write_sep("-", title, red=True)
            terminal.write_line(text)
        if self._run.options.plant or self._run.target == "native":
            return  # the suite's own implementation is mended, not waived
        for group in found[: words.IN_FULL]:
            items = [item for record in group.records if (item := _item(record))]
            if group.first.verdict in ("fail", "crash", "hang") and items:
                terminal.write_sep("-", "a waiver for this would read")
                ids = sorted({each for record in group.records for each in record.requirements})
                reason = group.first.message.splitlines()[0]
                terminal.write_line(proposal(ids, items, reason, self._run.versions, self._run.target))

    @property
    def _terminal(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")


def _item(record: Record) -> Item | None:
    if record.variant is None or record.layout is None:
        return None
    return Item(record.item, record.requirements, record.variant, record.layout, record.workload)
