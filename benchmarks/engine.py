"""The engine beside what else there is: `python -m benchmarks.engine`; docs/benchmarks.md explains it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from benchmarks import first_verdict, recovery, report, rounds
from benchmarks.contenders.roster import CONTENDERS

_DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_BEGIN, _END = "<!-- figures: written by benchmarks.engine -->", "<!-- end of figures -->"
_REPLACEMENTS = 20
_COLD_AND_WARM = 5


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", "repeats", default=5, metavar="N", help="times that each contender runs")
@click.option("--ranks", "worlds", default="2,4", metavar="N,...", help="world sizes, each a divisor of 8")
@click.option("--cases", "count", default=60, metavar="N", help="cases in each run")
@click.option("--slow-cases", "slow_count", default=3, metavar="N", help="for a contender that needs seconds for one")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write all figures to this file")
@click.option("--markdown", is_flag=True, help="write the tables into docs/benchmarks.md")
def main(repeats: int, worlds: str, count: int, slow_count: int, json_path: Path | None, markdown: bool) -> None:
    """Measure the engine, the contenders, the wait for a first verdict and for a replaced world."""
    plan = rounds.Plan(repeats, [int(world) for world in worlds.split(",")], count, slow_count)
    samples = rounds.run(plan, CONTENDERS, _tell)
    warm_s, cold_s = _first_verdicts()
    results = report.Results(plan, CONTENDERS, samples, cold_s, warm_s, recovery.seconds(4, _REPLACEMENTS))
    click.echo(f"\n{report.machine()}; {count} cases, {repeats} rounds: median (least-greatest)")
    for table in report.tables(results):
        click.echo(f"\n{table.text()}")
    if json_path is not None:
        json_path.write_text(json.dumps(report.to_json(results), indent=1) + "\n")
    if markdown:
        _write_document(results)


def _tell(sample: rounds.Sample) -> None:
    click.echo(
        f"round {sample.round + 1}, {sample.world} ranks, {sample.contender}: "
        f"{sample.fixed_s:.1f} s, then {sample.cases_per_s:.3g} cases/s"
    )


def _first_verdicts() -> tuple[list[float], list[float]]:
    """Returns the seconds with a warm page cache, which the run before has left, and with a cold one."""
    warm_s: list[float] = []
    cold_s: list[float] = []
    for _ in range(_COLD_AND_WARM):
        first_verdict.forget_files()
        cold_s.append(first_verdict.seconds())
        warm_s.append(first_verdict.seconds())
    return warm_s, cold_s


def _write_document(results: report.Results) -> None:
    """Puts the tables between the document's two marks."""
    before, _, rest = _DOCUMENT.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    told = f"{report.machine()}; {results.plan.count} cases, {results.plan.rounds} rounds; median (least-greatest)."
    parts = (_BEGIN, told, *(table.markdown() for table in report.tables(results)), _END)
    _DOCUMENT.write_text(before + "\n\n".join(parts) + after)


if __name__ == "__main__":
    main()
