"""What layouts do to the router's gradient of each loss, on real ranks: `python -m benchmarks.loss_gradients BACKEND`.

A number is the finished gradient of the router's weight over the single-device one: the mean over microbatches and data
parallel groups of what the oracle computes for the microbatch alone. Of what a backend claims the loss itself is
followed, whose fractions may be of slots or of tokens, and never how gradients are gathered. Workloads are those of the
checks of LOSS. With --markdown the table of the backend in docs/loss_gradients.md is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
from torch import Tensor

from moe_conformance.backends.registry import load
from moe_conformance.chapters.losses import workloads as losses
from moe_conformance.chapters.losses.judge.loss_rules import Rule, Steps
from moe_conformance.chapters.losses.judge.loss_steps import Step, steps_of
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.judging.observed.scopes import shard_of
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Workload

DOCUMENT = Path(__file__).parent.parent / "docs" / "loss_gradients.md"
BACKENDS = ("native", "megatron-core", "torchtitan", "transformers", "deepspeed")
LAYOUTS = (
    Layout(1),
    Layout(2),
    Layout(2, ep=2),
    Layout(4, ep=2),
    Layout(2, tp=2, ep=2),
    Layout(4, tp=2, ep=2),
    Layout(2, cp=2, ep=2),
    Layout(4, tp=2, cp=2),
)
# A loss, and workloads of it alone: of the first that a backend has on one rank.
LOSSES = {
    "switch": ("losses-auxiliary", "losses-top-3-normalised", "losses-top-1"),
    "sequence": ("losses-sequence",),
    "global": ("losses-global",),
    "z-loss": ("losses-z",),
    "first choice": ("losses-first-choice", "losses-top-1"),
}
_SAME = 1e-4  # of the norm of the expected gradient: what is left over beside a multiple of it


@dataclass
class Table:
    """The cells of one backend, and the sentences under it."""

    rows: dict[str, list[str]] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def because(self, reason: str) -> str:
        """Return the mark of a reason."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return f"[{self.reasons.index(reason) + 1}]"

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        names = [layout.name for layout in LAYOUTS]
        lines = ["| loss | parameter | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
        lines += [f"| {loss} | router weight | " + " | ".join(cells) + " |" for loss, cells in self.rows.items()]
        return [*lines, *([""] if self.reasons else []), *(f"{n}. {why}" for n, why in enumerate(self.reasons, 1))]


def workload_of(name: str, variant: str, layout: Layout) -> Workload:
    """Return a workload of the losses by its name."""
    return next(each for each in losses.scripts(variant, layout, "full") if each.name == name)


def multiple(found: Tensor, expected: Tensor) -> float | None:
    """Return by what a gradient is multiplied, or None where it is no multiple of the expected one.

    >>> multiple(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    2.0
    """
    factor = float((found * expected).sum() / expected.square().sum())
    return factor if float((found - factor * expected).norm() / expected.norm()) < _SAME else None


def multiples(outcome: Outcome) -> Iterator[float | None]:
    """Yield the multiple of every rank in every step in which the losses are all that trains."""
    claims = outcome.ranks[0].claims
    for step in steps_of(outcome):
        if _loss_alone(step):
            rule = Rule(fractions=claims.loss_fractions, remembers=claims.global_counts == "step")
            steps = Steps(outcome.workload.config, rule, step.parts(0), step.scale)
            expected = steps.loss_gradient(steps.names[0])
            for finals, shards in zip(step.finals, step.shards, strict=True):
                final = finals[0] if finals else None
                yield None if final is None else multiple(final.double(), shard_of(expected, shards[0]))


def _loss_alone(step: Step) -> bool:
    upstreams = [upstream for rank in range(step.workload.layout.world) for batch in step.batches(rank)
                 for upstream in batch.upstream]  # fmt: skip
    return not any(bool(upstream.any()) for upstream in upstreams)


def cell(outcome: Outcome, table: Table, lacking: str) -> str:
    """Return what a run shows; `lacking` says what is not there where the backend refuses."""
    if outcome.refusal is not None:
        return f"{lacking} {table.because(str(outcome.refusal.error))}"
    if bad := [rank for rank in outcome.ranks if rank.status != "ok"]:
        return f"{bad[0].status} {table.because(str(bad[0].error))}"
    if raised := [answer for rank in outcome.ranks for answer in rank.answers if answer.raised]:
        return f"raises {table.because(raised[0].error)}"
    found = {"no multiple" if each is None else f"{each:.3f}" for each in multiples(outcome)}
    return ", ".join(sorted(found))


def measure(engine: Engine, backend: str, variant: str, layouts: Sequence[Layout] = LAYOUTS) -> Table:
    """Run every loss on every layout."""
    table = Table()
    for loss, names in LOSSES.items():
        alone = {name: moe_step(engine, backend, workload_of(name, variant, layouts[0])) for name in names}
        offered = [name for name, outcome in alone.items() if outcome.refusal is None]
        name = offered[0] if offered else names[0]
        cells = [cell(alone[name], table, "no such loss")]
        for layout in layouts[1:]:
            if not offered:
                cells.append(cells[0])
                continue
            workload = next((w for w in losses.scripts(variant, layout, "full") if w.name == name), None)
            outcome = None if workload is None else moe_step(engine, backend, workload)
            cells.append("no workload" if outcome is None else cell(outcome, table, "no such layout"))
        table.rows[loss if name == names[0] else f"{loss} ({name.removeprefix('losses-')})"] = cells
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="BACKEND")
@click.option("--markdown", is_flag=True, help="write the table into docs/loss_gradients.md")
def main(name: str, markdown: bool) -> None:
    """Measure the losses of a backend."""
    torch.set_num_threads(1)
    backend = load(name)
    variant = "alltoall" if "alltoall" in backend.variants else backend.variants[0]
    preload = (*getattr(backend, "preload", ()), "moe_conformance.scenarios.moe_step")
    with Engine(preload=preload, environment=getattr(backend, "environment", {})) as engine:
        table = measure(engine, name, variant)
    versions = ", ".join(f"{package} {version}" for package, version in backend.versions().items())
    text = "\n".join([f"{versions}; exchange {variant}.", "", *table.lines()])
    click.echo(text)
    if markdown:
        begin, end = f"<!-- {name}: written by benchmarks.loss_gradients -->", f"<!-- end of {name} -->"
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(begin)
        _, _, after = rest.partition(end)
        DOCUMENT.write_text(before + f"{begin}\n\n{text}\n\n{end}" + after, encoding="utf-8")


if __name__ == "__main__":
    main()
