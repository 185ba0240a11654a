"""Makes the record of an item that ended, and the report by which pytest shows it."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moe_conformance.plugin.run import Run
from moe_conformance.plugin.trial import Ending, Trial, check_and_requirements
from moe_conformance.report.records import CASE_CRASHED, EVERY_RANK_FINISHES, FAILING, PROPERTY, Record
from moe_conformance.report.words import failure
from moe_conformance.waiving import Item, Waiver, only_should
from moe_conformance.workloads.drawn.example import to_json
from moe_conformance.workloads.records.told import told


def record_of(run: Run, item: pytest.Item, trial: Trial, ended: Ending, checks: Sequence[pytest.Item] = ()) -> Record:
    """Return the record of an item that ended; a waiver changes the verdict of a failure, and of a pass.

    A fault of the whole case is one of all requirements that its checks decide, and a crash one of EXCH-09 too. It is
    one fault, which a waiver excuses whatever requirements of the case it is for.

    Args:
        run: What is judged.
        item: The check's node.
        trial: Its trial.
        ended: How it ended.
        checks: The checks of its case; none if it draws.
    """
    decided = tuple(sorted(trial.tally.decided)) if ended.verdict == "pass" else ()
    requirements = ended.violated or decided or trial.requirements
    waiver = waiver_of(run, item, trial, requirements, ended)
    if ended.of_case and not (waiver is not None and waiver.excuses(ended.faults)):
        beside = EVERY_RANK_FINISHES if ended.crashed else ()
        of_case = [each for check in checks for each in check_and_requirements(check)[1]]
        requirements = tuple(dict.fromkeys((*requirements, *beside, *of_case)))
    if advised(run, requirements, ended):
        ended = replace(ended, verdict="not kept", message=f"SHOULD, not kept: {ended.message}")
    elif waiver is not None and ended.verdict in ("fail", "crash", "hang"):
        ended = _excused(ended, waiver)
    elif waiver is not None and ended.verdict == "pass":
        message = f"{waiver.id} waives this check, but it passes: narrow the waiver or delete it"
        ended = Ending("unexpected pass", message, "UnexpectedPass")
    tally, outcome = trial.tally, trial.outcome
    return Record(
        node=item.nodeid,
        check=trial.check,
        requirements=requirements,
        verdict=ended.verdict,
        message=ended.message,
        kind=ended.kind,
        stage=ended.stage,
        blamed=ended.blamed,
        variant=trial.cell.variant if trial.cell else None,
        layout=trial.cell.layout.name if trial.cell else None,
        workload=trial.workload.name if trial.workload else None,
        traits=told(trial.workload) if trial.workload else (),
        compared={"elements": tally.elements, "pairs": tally.pairs, "ranks": sorted(tally.ranks)},
        bits=(tally.of_two_runs, tally.other_bits),
        travelled=tally.travelled,
        deviations={name: each.plain() for name, each in tally.deviations.items()},
        worst=min(max(tally.worst, *(fault.size or 0.0 for fault in ended.faults), 0.0), sys.float_info.max),  # no inf
        resolved=dict(outcome.ranks[0].resolved) if outcome else {},
        detail=ended.detail,
        waiver=None if waiver is None else waiver.id,
        runs=trial.runs,
        drawn=trial.drawn,
        replay=_kept_examples(run, trial, ended),
    )


def _kept_examples(run: Run, trial: Trial, ended: Ending) -> tuple[str, ...]:
    """Write each drawn workload that failed into the report folder; return the command that replays each.

    Nothing is written where there is no such folder, or nothing was drawn.
    """
    if not run.options.report or trial.cell is None:
        return ()
    commands: list[str] = []
    for number, mismatch in enumerate(ended.failed):
        assert mismatch.outcome is not None  # those in `failed` have one
        name = "-".join(["drawn", trial.cell.id, mismatch.requirement or mismatch.stage])
        path = Path(run.options.report) / f"{name}{f'-{number}' if number else ''}.json"
        origin = {"backend": run.target, "versions": dict(run.versions), "diagnosis": str(mismatch)}
        content = {"said": origin, "workload": to_json(mismatch.outcome.workload)}
        try:
            path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
        except OSError:  # a full disk, which the reporter meets too and tells
            continue
        commands.append(run.options.replay(path))
    return tuple(commands)


def as_of_its_case(ended: Ending, reported: Collection[str], elsewhere: bool) -> Ending:
    """Return how a check ended: "not run" if a fault of the whole case ended it that another check reports.

    Args:
        ended: How it ended.
        reported: The messages of the case's faults that checks of it have reported.
        elsewhere: Another check of the case decides EXCH-09, and reports a crash.
    """
    if (ended.of_case and ended.message in reported) or (ended.crashed and elsewhere):
        what = "crashed" if ended.crashed else "breaks a limit that is declared wrongly"
        return Ending("not run", f"not run: the case {what}, which another check of it reports", CASE_CRASHED)
    return ended


def _known(waiver: Waiver | None, requirements: tuple[str, ...], ended: Ending) -> bool:
    """Whether a waiver covers the requirements and names how the item ended."""
    return waiver is not None and set(requirements) <= set(waiver.requirements) and waiver.excuses(ended.faults)


def _excused(ended: Ending, waiver: Waiver) -> Ending:
    """Return a failure as waived if the waiver names it, else with a note that it is another one."""
    if waiver.excuses(ended.faults):
        return replace(ended, verdict="waived", message=f"waived by {waiver.id}: {ended.message}")
    fault = next(fault for fault in ended.faults if not waiver.excuses([fault]))
    size = "" if fault.size is None else f", {fault.size:.3g} x the allowed error"
    told = "" if fault.message in ended.message else f": {fault.message}"
    note = f"{waiver.id} waives another failure here; this is {fault.kind} in {fault.stage}{size}{told}"
    return replace(ended, detail="\n".join(filter(None, [note, ended.detail])))


def advised(run: Run, requirements: tuple[str, ...], ended: Ending) -> bool:
    """Whether a failed item does not fail the run: it violates SHOULD requirements only, without --strict."""
    strict = run.options.strict or run.options.plant  # a planted bug of a SHOULD is to be detected
    return ended.verdict == "fail" and not strict and only_should(requirements)


def excused(run: Run, item: pytest.Item, trial: Trial, ended: Ending) -> bool:
    """Whether a waiver names all faults of a failed item."""
    waiver = waiver_of(run, item, trial, ended.violated or trial.requirements, ended)
    return waiver is not None and waiver.excuses(ended.faults)


def waiver_of(run: Run, item: pytest.Item, trial: Trial, requirements: tuple[str, ...], ended: Ending) -> Waiver | None:
    """Return the waiver of the item, None without one; of several the one that excuses how it ended.

    Without --strict a SHOULD that is not kept needs none; a crash or a hang always does. A fault of the whole case is
    looked for under all requirements, a crash of a further run under those of the check and that of a run that ends.
    """
    if not run.options.strict and only_should(requirements) and ended.verdict not in ("crash", "hang"):
        return None
    if trial.cell is None:
        return run.waivers.match(Item.of_groups(item.name, requirements), ended.faults)
    workload = trial.workload.name if trial.workload else None
    place = Item(item.name, requirements, trial.cell.variant, trial.cell.layout.name, workload)
    waiver = run.waivers.match(place, ended.faults)
    if not (ended.crashed or ended.of_case) or _known(waiver, requirements, ended):
        return waiver
    others = () if ended.of_case else EVERY_RANK_FINISHES
    found = run.waivers.match(replace(place, requirements=others), ended.faults)
    return found if found is not None and found.excuses(ended.faults) else waiver or found


def attach(report: pytest.TestReport, record: Record, config: pytest.Config) -> None:
    """Add the record to the report: the object, or plain data where xdist sends it to another process."""
    in_worker = hasattr(config, "workerinput")
    report.user_properties.append((PROPERTY, record.to_json() if in_worker else record))


def translate(report: pytest.TestReport, record: Record, run: Run) -> None:
    """Set pytest's outcome: failing verdicts fail, pass passes, the others are skips with a reason."""
    if record.verdict in FAILING:
        report.outcome = "failed"
        report.longrepr = failure(record, run.options.again)
    elif record.verdict != "pass":
        report.outcome = "skipped"
        path, line, _ = report.location
        report.longrepr = (path, line or 0, record.message)
