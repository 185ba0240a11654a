"""Mutates the oracles of both sides and says what their tests did not notice: `python -m tools.mutants`."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import click

from tools.mutants import report, survivors, trial
from tools.mutants.changes import Mutant, mutants_of
from tools.mutants.oracles import Checkout, NotHeld
from tools.mutants.report import Results
from tools.mutants.trial import Trial


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--each", default=2, metavar="N", help="mutants of each file, drawn at random")
@click.option("--seed", default=1, metavar="N", help="of the draw")
@click.option("--all", "every", is_flag=True, help="every mutant: hours")
@click.option("--only", multiple=True, metavar="FILE", help="an oracle; may be given several times  [default: all]")
@click.option("--jobs", default=1, metavar="N", help="processes at a time")
@click.option("--markdown", is_flag=True, help="write the figures into docs/mutants.md")
@click.option("--root", default=Path(__file__).parents[2], type=Path, help="the checkout", show_default="this one")
def main(each: int, seed: int, every: bool, only: tuple[str, ...], jobs: int, markdown: bool, root: Path) -> None:
    """Mutate the oracles, and see whether the tests that hold them notice."""
    checkout = Checkout(root.resolve())
    plan = _plan(checkout, list(only) or checkout.oracles())
    reasons = {key: reason for key, reason in survivors.known(checkout.root).items() if not only or key[0] in only}
    drawn = [mutant for made in plan.made.values() for mutant in _drawn(made, seed, None if every else each)]
    if not drawn:
        raise click.ClickException("there is nothing to mutate: " + "; ".join(plan.not_held))
    _see_them_pass(checkout, sorted({test for tests in plan.tests.values() for test in tests}), jobs)
    verdicts = []
    trials = [Trial(checkout.root, plan.tests[mutant.file], mutant) for mutant in drawn]
    for tried, verdict in trial.run(trials, jobs):
        assert tried.mutant is not None
        verdicts.append((tried.mutant, verdict))
        click.echo(f"{len(verdicts)}/{len(drawn)} {tried.mutant}: {verdict.by or 'NOT NOTICED'}", err=True)
    stale = survivors.stale(reasons, [mutant for made in plan.made.values() for mutant in made])
    results = Results(plan.chapters, verdicts, reasons, stale, plan.not_held)
    click.echo(report.markdown(results))
    if markdown:
        report.write(checkout.root, report.markdown(results))
    found = report.problems(results, goal=0.0 if only else report.GOAL)
    if found:
        raise click.ClickException("\n\n".join(found))


@dataclass(frozen=True)
class _Plan:
    """Of each file its chapter, the tests that hold it and all its mutants; and why other files have none."""

    chapters: dict[str, str] = field(default_factory=dict)
    tests: dict[str, list[str]] = field(default_factory=dict)
    made: dict[str, list[Mutant]] = field(default_factory=dict)
    not_held: list[str] = field(default_factory=list)


def _plan(checkout: Checkout, files: list[str]) -> _Plan:
    plan = _Plan()
    for file in files:
        try:
            chapter, tests = checkout.chapter(file), checkout.tests(file)
        except NotHeld as error:
            plan.not_held.append(str(error))
            continue
        plan.chapters[file], plan.tests[file] = chapter, tests
        plan.made[file] = mutants_of((checkout.root / file).read_text(), file)
    return plan


def _drawn(mutants: list[Mutant], seed: int, count: int | None) -> list[Mutant]:
    """Draw some mutants of a file, or take all; each has its own lot, which no edit of other lines changes."""
    return sorted(mutants, key=lambda mutant: sha256(f"{seed} {mutant.key}".encode()).digest())[:count]


def _see_them_pass(checkout: Checkout, tests: list[str], jobs: int) -> None:
    """Refuse tests that fail without a mutant: they would notice whatever comes."""
    for tried, verdict in trial.run([Trial(checkout.root, [test]) for test in tests], jobs):
        if verdict.noticed:
            raise click.ClickException(f"{tried.tests[0]} fails without a mutant, by {verdict.by}: mend that first")


if __name__ == "__main__":
    main()
