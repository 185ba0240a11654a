"""Runs cases on ranks and records them: outcomes, those of their twins, and the verdicts of every check on them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from moe_conformance.contract import Backend
from moe_conformance.engine import Engine
from moe_conformance.plugin.run import engine_needs
from moe_conformance.recorded import judging
from moe_conformance.recorded.again import library_of, verdicts_of
from moe_conformance.recorded.files import Recorded, Recorder, write
from moe_conformance.recorded.pools import BadRecording
from moe_conformance.recorded.workloads import fingerprint
from moe_conformance.reproducing.alongside import Twins
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome, RankOutcome
from moe_conformance.workloads.plan import Case, Plan
from moe_conformance.workloads.records.features import broken

Say = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """What is recorded: a backend by the name that ranks load, with the versions that it depends on."""

    target: str
    backend: Backend
    versions: Mapping[str, str]


def named_cases(plan: Plan, ids: Iterable[str]) -> list[Case]:
    """Return the cases of these ids.

    Raises:
        BadRecording: there is no such case.
    """
    found = []
    for id in ids:
        cells = (cell for cell in plan.cells if id.startswith(f"{cell.id}-"))
        names = ((cell.variant, cell.layout.name, id.removeprefix(f"{cell.id}-")) for cell in cells)
        case = next((case for place in names if (case := judging.find(plan, *place)) is not None), None)
        if case is None:
            raise BadRecording(f"there is no case {id} of {plan.backend.name}")
        found.append(case)
    return found


def first_cases(plan: Plan, requirements: Sequence[str]) -> list[Case]:
    """Return for each requirement the first case, in running order, that a check of it reads.

    Raises:
        BadRecording: no check reads a case for it.
    """
    found: dict[str, Case] = {}
    for id in requirements:
        readers = [check for check in judging.readers() if id in check.requirements]
        cases = (case for check in readers for case in plan.of(check.run, check.when) if _limit(case) is None)
        case = next(cases, None)
        if case is None:
            raise BadRecording(f"no check reads a case of {plan.backend.name} for {id}")
        found[case.id] = case
    return list(found.values())


def record(subject: Subject, cases: Sequence[Case], output: Path, say: Say) -> int:
    """Run cases, and write what is recorded into a folder of the library and its version; return the bytes written.

    Raises:
        BadRecording: a case is beyond a limit, holds something that is no data, or is judged otherwise once stored.
    """
    if outside := [f"{case.id}: {_limit(case)}" for case in cases if _limit(case) is not None]:
        raise BadRecording(f"beyond a declared limit, so that nothing is observed: {'; '.join(outside)}")
    folder = output / subject.backend.name / library_of(subject.versions)[1]
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    with Engine(**engine_needs(subject.backend)) as engine:
        for case in cases:
            recorded = _recorded(subject, engine, case)
            size = write(folder, recorded)
            written += size
            verdicts = [verdict.verdict for verdict in recorded.verdicts.values()]
            counts = ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))
            say(f"{case.id}: {counts or 'no check reads it'}; {len(recorded.twins)} equivalent runs, {size} bytes")
    say(f"written: {folder}, {written} bytes")
    return written


def _recorded(subject: Subject, engine: Engine, case: Case) -> Recorded:
    """Run a case and judge it, as it is and as it is stored.

    Raises:
        BadRecording: the verdicts differ.
    """
    twins = Twins(
        subject.backend,
        "cpu",
        lambda some: [moe_step(engine, subject.target, each) for each in some],
        engine.renew,
    )
    outcome = moe_step(engine, subject.target, case.workload)
    verdicts = judging.verdicts(case, outcome, twins)
    recorder = Recorder(text=_without_folders)
    recorded = recorder.complete(
        Recorded(
            backend=subject.target,
            versions=subject.versions,
            suite=version("moe-conformance"),
            variant=case.cell.variant,
            layout=case.cell.layout.name,
            workload=case.workload.name,
            variants=tuple(subject.backend.variants),
            ran=recorder.ran(fingerprint(case.workload), _trimmed(outcome)),
            twins={
                how: recorder.ran(
                    fingerprint(ran.twin.workload), None if ran.outcome is None else _trimmed(ran.outcome), ran.why_not
                )
                for how, ran in twins.taken.items()
            },
        )
    )
    stored = verdicts_of(recorded, case)
    for check, verdict in verdicts.items():
        if stored[check].judged != verdict.judged:
            raise BadRecording(f"{case.id}: {check} is {verdict}, and of what is stored {stored[check]}")
    return replace(recorded, verdicts=stored)


def _limit(case: Case) -> str | None:
    limit = broken(case.cell.limits, case.workload, case.cell.device)
    return None if limit is None or limit.proof == "refused" else limit.reason


_FILE = re.compile(r'^ *File ".+", line \d+.*', re.MULTILINE)


def _trimmed(outcome: Outcome) -> Outcome:
    """Return an outcome without source lines of the library, and without what its ranks printed: neither is judged."""

    def trimmed(rank: RankOutcome) -> RankOutcome:
        lines = None if rank.traceback is None else "\n".join(_FILE.findall(rank.traceback))
        return replace(rank, traceback=lines, output=None)

    return replace(outcome, ranks=tuple(map(trimmed, outcome.ranks)))


def _without_folders(text: str) -> str:
    """Return a text without the folders of this machine from which modules are imported."""
    folders = {os.path.realpath(entry or os.curdir) for entry in sys.path} | {entry for entry in sys.path if entry}
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(f"{folder}{os.sep}", "") if folder != os.sep else text
    return text
