"""The parity table: training steps on every kind of layout, held against one device quantity by quantity.

A row is a layout, a column a quantity: the loss, the norm, gradients, parameters and moments. What is in a cell the
judges of the chapter have noted in their tally while they decided their requirements (`Deviation`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moe_conformance.chapters.training.judge.expected import PARAMETERS
from moe_conformance.chapters.training.judge.reported import judge_loss, judge_norm
from moe_conformance.chapters.training.judge.state import GRADIENTS, judge_first_kept, judge_steps, quantity
from moe_conformance.chapters.training.workloads import NAMES, script
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import Deviation, Mismatch, NotOffered, RunFailed, Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.chapter import EP2, EP2_EDP2, EP2_ETP2, SINGLE, TP2_EP2

_OF_STEPS = tuple(quantity(what, steps) for steps in (1, 4) for what in (PARAMETERS, "moments"))
QUANTITIES = ("loss", "norm", GRADIENTS, *_OF_STEPS)

Judge = Callable[[Outcome, Tally], None]
# Of each script its judges, with the quantities that they compare. Gradients are those that the momentum of SGD has
# after the first step, where nothing is clipped; with sharded state those that the first moment of AdamW has.
_JUDGES: dict[str, tuple[tuple[Judge, tuple[str, ...]], ...]] = {
    "train-adamw": ((judge_loss, ("loss",)), (judge_norm, ("norm",)), (judge_steps, _OF_STEPS)),
    "train-adamw-sharded": (
        (judge_loss, ("loss",)),
        (judge_norm, ("norm",)),
        (judge_first_kept, (GRADIENTS,)),
        (judge_steps, _OF_STEPS),
    ),
    "train-sgd": ((judge_first_kept, (GRADIENTS,)),),
}


# Of scripts that take the place of those, where a backend refuses them: another dtype, another optimiser.
_OTHERS = ((judge_loss, ("loss",)), (judge_norm, ("norm",)), (judge_first_kept, (GRADIENTS,)), (judge_steps, _OF_STEPS))


@dataclass(frozen=True)
class Row:
    """A layout, and the scripts that run there; none where the suite has no such layout, and why."""

    name: str
    layout: Layout
    scripts: tuple[str, ...] = ("train-adamw", "train-sgd")
    why: str = ""


ROWS = (
    Row("single", SINGLE),
    Row("dp", Layout(2)),
    Row("ep", EP2),
    Row("ep + dp", EP2_EDP2),
    Row("tp + ep", TP2_EP2),
    Row("cp + ep", Layout(4, cp=2, ep=2)),
    Row("pp + ep", Layout(4, pp=2, ep=2), (), "no such layout in the suite: a trainer has all layers on every rank"),
    Row("etp", EP2_ETP2),
    Row("sharded", EP2_EDP2, ("train-adamw-sharded",)),
)


def others(row: Row) -> list[str]:
    """Return the scripts that may take the place of a row's: with the same kind of state, and gradients all finite."""
    sharded = any(script(name, row.layout).config.training.sharded_state for name in row.scripts)
    found = []
    for name in NAMES if row.scripts else ():
        workload = script(name, row.layout)
        batches = [batch for call in workload.calls for given in call.given for batch in given["batches"]]
        finite = all(bool(batch.target_TD.isfinite().all()) for batch in batches)
        if name not in row.scripts and finite and workload.config.training.sharded_state == sharded:
            found.append(name)
    return found


@dataclass
class Compared:
    """What was compared on a layout: a deviation for each quantity, or in words why there is none; and failures."""

    cells: dict[str, Deviation | str]
    failures: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)  # scripts with their variants, such as `train-sgd in alltoall`

    @classmethod
    def nothing(cls, why: str) -> Compared:
        """Return a row without a number."""
        return cls(dict.fromkeys(QUANTITIES, why))

    @property
    def held(self) -> bool:
        """Whether nothing is beyond its bound, and nothing else failed."""
        return not self.failures and all(isinstance(each, str) or each.ratio <= 1 for each in self.cells.values())

    @property
    def empty(self) -> bool:
        """Whether there is no number, and nothing failed."""
        return not self.failures and all(isinstance(each, str) for each in self.cells.values())

    def add(self, name: str, outcome: Outcome) -> None:
        """Judge the outcome of a script."""
        self.ran.append(f"{name} in {outcome.workload.config.variant}")
        for judge, quantities in _JUDGES.get(name, _OTHERS):
            tally, why = Tally(), "not in the script that ran"
            try:
                judge(outcome, tally)
            except NotOffered as reason:
                why = str(reason)
            except Mismatch as mismatch:
                failed = "the run failed" if isinstance(mismatch, RunFailed) else "what precedes it is wrong"
                why = f"not compared: {failed}"
                if str(mismatch) not in self.failures:
                    self.failures.append(str(mismatch))
            self.cells |= {each: tally.deviations.get(each, why) for each in quantities}

    def leave_out(self, name: str, why: str) -> None:
        """Say why a script did not run."""
        if name in _JUDGES:
            self.cells |= {each: why for _, quantities in _JUDGES[name] for each in quantities}
