"""An hour's training in miniature: `python -m benchmarks.overload_picture` meters it, and draws docs/overload.svg.

A small model is trained on eight ranks of this machine, in phases: with its own router, and with routing forced by each
strategy. The picture shows the overload factor that native's meter reports of every step, and what the strategy's
closed form says. The command ends with 1 where a phase does not follow its closed form, or where memory grows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

import click

from benchmarks.metered_training import CONFIG, LAYOUT, Forced, Plan, Step, over_ranks
from moe_conformance.engine import Engine, Job
from moe_conformance.reference.forcing.imbalance import overload

_HELD = CONFIG.experts // LAYOUT.ep
_RATIO = 3.0
_BLOCKS = (0, 1)
_MIB = 1 << 20
_GROWTH = 2 * _MIB  # of a rank from the middle to the end: what an allocator may keep


@dataclass(frozen=True)
class Phase:
    """Steps with one strategy, and the factor by its closed form; None where chance or the model decides."""

    name: str
    forced: Forced = ()
    factor: float | None = None


OWN = Phase("own router")
PHASES = (
    OWN,
    Phase("round robin", (("round_robin", None),), 1.0),
    Phase("worst rank", (("worst_rank", None),), overload(CONFIG.top_k, CONFIG.experts, _HELD)),
    OWN,
    Phase("alternating", (("alternating", None),), overload(CONFIG.top_k, CONFIG.experts, _HELD)),
    Phase("ratio 3", (("ratio", _RATIO),), LAYOUT.ep * _RATIO / (_RATIO + LAYOUT.ep - 1)),
    Phase(
        "one expert",
        (("one_expert", None),),
        # Of the K slots of a token one goes to the hot expert, the others evenly to the E - 1 others, N - 1 beside it.
        LAYOUT.ep * (1 + (CONFIG.top_k - 1) * (_HELD - 1) / (CONFIG.experts - 1)) / CONFIG.top_k,
    ),
    Phase("random", (("random", None),)),
    OWN,
)


def of_steps(steps: int) -> list[Phase]:
    """Return the phase of every step; phases are as long as each other, up to one step."""
    return [PHASES[number * len(PHASES) // steps] for number in range(steps)]


def trained(engine: Engine, phases: Sequence[Phase]) -> list[list[Step]]:
    """Train, and return every step of every rank.

    Raises:
        RuntimeError: a rank did not finish.
    """
    strategies = tuple(dict.fromkeys(phase.forced for phase in phases))
    plan = Plan(strategies, tuple(strategies.index(phase.forced) for phase in phases))
    deadline_s = 60 + 2.0 * len(phases)
    job = Job("benchmarks.metered_training:train", plan, LAYOUT.world, LAYOUT.groups(), deadline_s=deadline_s)
    result = engine.run(job)
    if not result.ok:
        raise RuntimeError("; ".join(f"rank {each.rank}: {each.error}" for each in result.ranks if each.error))
    return [each.value for each in result.ranks]


def off(phases: Sequence[Phase], factors: Sequence[float]) -> list[str]:
    """Return a sentence for every step whose factor is not that of its closed form."""
    return [
        f"step {number} ({phase.name}): factor {factor:.4f}; expected {phase.factor:.4f}"
        for number, (phase, factor) in enumerate(zip(phases, factors, strict=True))
        if phase.factor is not None and abs(factor - phase.factor) > 1e-6
    ]


# ---- the picture ---------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP = 900, 300, 50, 30
_LINES = ("#1f77b4", "#d62728")  # of the blocks


def picture(phases: Sequence[Phase], series: Sequence[Sequence[float]]) -> str:
    """Return an SVG of the factor of every block by step, with the closed form of each phase behind it."""
    top = float(LAYOUT.ep)

    def x(step: float) -> str:
        return f"{_LEFT + step * _WIDTH / len(phases):.1f}"

    def y(factor: float) -> str:
        return f"{_TOP + (top + 0.1 - factor) * _HEIGHT / (top - 0.8):.1f}"

    parts = [f'<rect width="{_LEFT + _WIDTH + 20}" height="{_TOP + _HEIGHT + 45}" fill="white"/>']
    bounds = [0, *(at for at in range(1, len(phases)) if phases[at] != phases[at - 1]), len(phases)]
    for shaded, (first, end) in enumerate(pairwise(bounds)):
        phase, wide = phases[first], float(x(end)) - float(x(first))
        fill = ("#f2f2f2", "#ffffff")[shaded % 2]
        parts.append(f'<rect x="{x(first)}" y="{_TOP}" width="{wide:.1f}" height="{_HEIGHT}" fill="{fill}"/>')
        parts.append(f'<text x="{x((first + end) / 2)}" y="{_TOP - 8}" text-anchor="middle">{phase.name}</text>')
        if phase.factor is not None:
            at = y(phase.factor)
            line = f'<line x1="{x(first)}" y1="{at}" x2="{x(end)}" y2="{at}" stroke="#999" stroke-width="5"/>'
            parts.append(line)
    for tick in (1.0, 1.25, 1.5, 1.75, 2.0):
        parts.append(f'<text x="{_LEFT - 6}" y="{float(y(tick)) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for factors, colour in zip(series, _LINES, strict=True):
        points = " ".join(f"{x(step + 0.5)},{y(factor)}" for step, factor in enumerate(factors))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
    under = "overload factor by step; blue: block 0, red: block 1, grey: closed form of what is forced"
    parts.append(f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 25}">{under} ({len(phases)} steps)</text>')
    size = f"0 0 {_LEFT + _WIDTH + 20} {_TOP + _HEIGHT + 45}"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="12">'
    return "\n".join([opening, *parts, "</svg>"]) + "\n"


# ---- the command ---------------------------------------------------------------------------------------------


def _table(phases: Sequence[Phase], series: Sequence[Sequence[float]]) -> str:
    lines = ["| steps | phase | least and greatest factor | closed form |", "| --- | --- | --- | --- |"]
    bounds = [0, *(at for at in range(1, len(phases)) if phases[at] != phases[at - 1]), len(phases)]
    for first, end in pairwise(bounds):
        own = [factor for factors in series for factor in factors[first:end]]
        told = "" if phases[first].factor is None else f"{phases[first].factor:.3f}"
        lines.append(f"| {first} to {end - 1} | {phases[first].name} | {min(own):.3f}, {max(own):.3f} | {told} |")
    return "\n".join(lines)


def _memory(ranks: Sequence[Sequence[Step]]) -> tuple[str, int]:
    """Say how much memory the largest rank takes, and return by how much any grows in the second half."""
    places = {"step 10": 10, "middle": len(ranks[0]) // 2, "end": -1}
    told = ", ".join(f"{max(of[at].resident for of in ranks) / _MIB:.1f} ({name})" for name, at in places.items())
    grown = max(of[-1].resident - of[len(of) // 2].resident for of in ranks)
    return f"Resident memory of the largest rank in MiB: {told}; grown in the second half: {grown / _MIB:.2f}", grown


def _loss(ranks: Sequence[Sequence[Step]], first: int, end: int) -> float:
    last_stage = [rank for ranks in LAYOUT.groups()["pp"] for rank in ranks[-1:]]
    return mean(step.loss for rank in last_stage for step in ranks[rank][first:end])


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--steps", default=500, metavar="N", type=click.IntRange(min=20))
@click.option("--out", default="docs/overload.svg", metavar="FILE", type=click.Path(path_type=Path))
def main(steps: int, out: Path) -> None:
    """Train, draw, and print what was metered."""
    phases = of_steps(steps)
    # The engine's ledger keeps every collective; without it what grows is the training's.
    preload = ("moe_conformance.chapters.groups.scenario", "benchmarks.metered_training")
    with Engine(preload=(*preload, "benchmarks.contenders.without_ledger")) as engine:
        ranks = trained(engine, phases)
    series = [over_ranks(ranks, "avg_overload_factor", block) for block in _BLOCKS]
    out.write_text(picture(phases, series), encoding="utf-8")
    memory, grown = _memory(ranks)
    print(_table(phases, series))
    first, last = _loss(ranks, 0, 10), _loss(ranks, -10, steps)
    print(f"Loss: {first:.4f} over the first ten steps, {last:.4f} over the last ten.")
    print(memory)
    wrong = [sentence for factors in series for sentence in off(phases, factors)]
    for sentence in wrong[:10]:
        print(sentence)
    sys.exit(1 if wrong or grown > _GROWTH else 0)


if __name__ == "__main__":
    main()
