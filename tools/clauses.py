"""Run the bug of every clause of requirements: `python -m tools.clauses [--only ID] [--seconds 600] [--whole]`.

Each clause of self_tests/chapters/*/clauses.toml has a planted bug or a lying backend that violates it. It runs on the
workload that it names for the requirement, and the checks of the requirement must fail there. A line for each clause
says by what; the status is 1 if one was not detected. The tests of planted bugs run the same bugs; this shows them
clause by clause, for some requirements, in seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import Mismatch
from self_tests.checked_runs import CheckedRuns, variant_for
from self_tests.lying_backends.expected import LIARS
from self_tests.planted_bugs import plants
from self_tests.spec.clauses import Clause, clauses
from self_tests.trial_runs import Runs


class Trial(NamedTuple):
    """One run in which a bug must be detected."""

    backend: str
    variant: str
    layout: Layout
    workload: str


def trials(clause: Clause) -> Iterator[Trial]:
    """Yield the runs of a clause's bug; none for bugs of many ranks, which virtual ranks find."""
    for plant in plants():
        for expected in plant.expects if plant.name == clause.bug else ():
            if expected.requirement == clause.requirement:
                yield Trial(plant.backend, variant_for(plant, expected), plant.layout, expected.workload)
    for liar, requirement, layout, workload, _ in LIARS:
        if (liar.__name__, requirement) == (clause.bug, clause.requirement):
            yield Trial(f"{liar.__module__}:{liar.__name__}", "alltoall", layout, workload)


def detected(checked: CheckedRuns, clause: Clause, trial: Trial) -> str:
    """Return what the checks of the requirement say of a run; "" if all of them pass."""
    verdicts = checked.verdicts(trial.backend, clause.requirement, trial.variant, trial.layout, trial.workload)
    return next((verdict.sentence for verdict in verdicts if isinstance(verdict, Mismatch)), "")


def main() -> int:
    """Print a line for each clause; 1 if the bug of one was not detected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="ID", help="a requirement, or the beginning of its id")
    parser.add_argument("--seconds", type=float, default=600.0, help="to run for at most; the rest is named")
    parser.add_argument("--whole", action="store_true", help="print whole messages, not their beginnings")
    given = parser.parse_args()
    asked = [
        clause
        for id, of_it in clauses().items()
        for clause in of_it
        if not given.only or id.startswith(tuple(given.only))
    ]
    if not asked:
        print(f"no requirement with a check begins with {', '.join(given.only)}", file=sys.stderr)
        return 2
    asked.sort(key=lambda clause: max((trial.layout.world for trial in trials(clause)), default=0))  # ranks are kept
    end, missed, left = time.monotonic() + given.seconds, 0, 0
    runs = Runs([], set())
    try:
        for clause in asked:
            if time.monotonic() > end:
                left += 1
                continue
            made = list(trials(clause))
            said = next((said for trial in made if (said := detected(CheckedRuns(runs), clause, trial))), "")
            missed += bool(made) and not said
            how = said[: None if given.whole else 120] if said else "NOT DETECTED" if made else "on virtual ranks only"
            print(f"{clause.requirement} {clause.text or '(the sentence)'!r} [{clause.bug}] {how}", flush=True)
    finally:
        runs.close()
    rest = f"; {left} not run in {given.seconds:g} s" if left else ""
    print(f"{len(asked)} clauses, {missed} not detected{rest}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
