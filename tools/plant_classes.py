"""Find planted bugs that show what others show: `python -m tools.plant_classes measure FILE`, then `again FILE`.

`measure` runs each planted bug on the workloads that it names and stores what every check says that reads them; it goes
on where it ended. What a bug shows is the checks of the requirements that it is expected to violate, with stage and
words; ranks, tokens, slots, experts and other numbers are left out of the words. `again` lists the bugs of no real
library that show nothing that others do not show which change the same class of native. Whether one of them can go is
for a reader to decide: it stays where its mechanism shows under another dtype, layout or size than that of the others.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from moe_conformance.backends import registry
from moe_conformance.judging.verdict import Mismatch, NotOffered
from moe_conformance.reproducing.alongside import Twins
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.spec.checks import Check, checks
from self_tests.checked_runs import CheckedRuns, faults, variant_for
from self_tests.checks import judge
from self_tests.planted_bugs import Plant, plants
from self_tests.trial_runs import DEADLINE_S, Run, Runs

_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d[\d.,]*(?:e[-+]?\d+)?|nan|inf)(?!\w)")
_SERIES = re.compile(r"#(?:(?:,| and|, and|\.\.|/|:| x|;)? ?#)+")
_MORE = re.compile(r";?(?: and)? # more(?: of the same kind)?")
_DETAILS = re.compile(r"; largest error: |\. Also: |; the first: |[;,] for example ")
_ERROR = re.compile(r"((?:raised|died|ended)[^:]*(?:::?#)?: (?:[\w.]+(?:Error|Exception|Warning)?)).*")
_PARTS = re.compile(r" ?\(/[^)]*\)|(?<=Settings)\([^)]*\)|(?<=\bof )(?:gate|up|down)\b")

Failure = tuple[str, str, str]  # check, stage, words


def words(sentence: str) -> str:
    """Return the first statement of a sentence, with its cause, without numbers."""
    told = _MORE.sub("", _DETAILS.split(_SERIES.sub("#", _NUMBER.sub("#", sentence)))[0])
    return _PARTS.sub("", _ERROR.sub(r"\1", told)).strip()


def changed(plant: Plant) -> list[str]:
    """Return the names of the classes of native in whose place a plant has its own."""
    own = [] if plant.native.__name__ == "PlantedNative" else ["Native"]
    return own + sorted(each.__qualname__ for each in plant.native.session_class.replaced)


@cache
def every_check() -> dict[str, Check]:
    """Return all checks by the requirements that they cite and their name."""
    return {f"{','.join(check.requirements)} {check.path}": check for check in checks()}


def failures(runs: Runs, plant: Plant, run: Run) -> Iterator[Failure]:
    """Yield what each check that fails says of a plant in a run; twins are run for requirements of the plant alone."""
    named = {each.requirement for each in plant.expects}
    if not run.workload:  # nothing runs: groups are only asked for
        for requirement in sorted(each.requirement for each in plant.expects if not each.workload):
            for verdict in CheckedRuns(runs).verdicts(plant.backend, requirement, run.variant, run.layout, ""):
                if isinstance(verdict, Mismatch):
                    yield requirement, verdict.stage, verdict.sentence
        return
    asked = {
        name: check
        for name, check in every_check().items()
        if check.reads(run.drawn()) and ("twins" not in check.arguments or named & set(_ids(name)))
    }
    outcome = runs.outcome(run, alone=any("twins" in check.arguments for check in asked.values()))
    step = partial(moe_step, runs.engine, run.backend, deadline_s=DEADLINE_S)
    twins = Twins(registry.load(run.backend), "cpu", lambda some: [step(each) for each in some], runs.renew)
    for name, check in asked.items():
        try:
            verdict = judge(check, outcome=outcome, twins=twins)
        except NotOffered:
            continue
        except Exception as error:  # the check cannot judge such a run: that shows the bug too
            yield name, "error", f"{type(error).__name__}: {error}"
        else:
            if isinstance(verdict, Mismatch):
                yield name, verdict.stage, verdict.sentence


def runs_of(plant: Plant) -> list[Run]:
    """Return the runs of a plant on the workloads that it names."""
    runs = (Run(plant.backend, variant_for(plant, e), plant.layout, e.workload) for e in plant.expects)
    return list(dict.fromkeys(runs))


def measure(path: Path, seconds: float, only: Iterable[str] = ()) -> None:
    """Run what is missing in the file for about so many seconds, and store it."""
    stored: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    end, names = time.monotonic() + seconds, set(only)
    asked = [plant for plant in plants() if not names or plant.name in names]
    todo = {f"{plant.name} {run.workload}": (plant, run) for plant in asked for run in runs_of(plant)}
    todo = {name: each for name, each in todo.items() if name not in stored}
    planned = [run for _, run in todo.values() if run.workload]
    runs = Runs(planned, faults() & set(planned))
    try:
        for name, (plant, run) in todo.items():
            if time.monotonic() > end:
                break
            stored[name] = list(failures(runs, plant, run))
    finally:
        path.write_text(json.dumps(stored, indent=1))
        runs.close()
    print(f"{len(stored)} measured, {len(todo.keys() - stored.keys())} to measure")


def shown(stored: Mapping[str, Iterable[Failure]], plant: Plant) -> set[Failure]:
    """Return what the checks that a plant names say of it, on the workloads for which it names them."""
    return {
        (check, stage, words(sentence))
        for expected in plant.expects
        for check, stage, sentence in stored.get(f"{plant.name} {expected.workload}", ())
        if expected.requirement in _ids(check)
    }


def again(stored: Mapping[str, Iterable[Failure]]) -> Iterator[tuple[Plant, list[Plant]]]:
    """Yield each plant of no real bug that shows nothing alone, with those that show the same; see the module."""
    every = {plant: shown(stored, plant) for plant in plants()}
    for plant, own in every.items():
        others = [each for each in every if each != plant and changed(each) == changed(plant) and own & every[each]]
        if own and not plant.real and own <= set().union(*(every[each] for each in others)):
            yield plant, others


def _ids(check: str) -> list[str]:
    return check.split()[0].split(",")


def main() -> None:
    """Measure, or list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "again"))
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="of the plants to measure; all unless some are named")
    parser.add_argument("--seconds", type=float, default=3600.0, help="to measure for at most")
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.file, given.seconds, given.names)
    else:
        for plant, others in again(json.loads(given.file.read_text())):
            print(f"{plant.name}: {', '.join(each.name for each in others)}")


if __name__ == "__main__":
    main()
