"""The cases on which oracles are seen to decide: those of the planted bugs, run by native and by the bugs."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

from moe_conformance.backends import registry
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.reproducing.alongside import Twins
from moe_conformance.scenarios.group_lists import group_lists
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.spec.checks import by_requirement
from moe_conformance.workloads import group_sizes as sizes
from moe_conformance.workloads import recipes, routers, scripts, virtual
from moe_conformance.workloads.records.workload import Wish, Workload
from self_tests.checked_runs import EXPECTED, NATIVE, variant_for
from self_tests.planted_bugs import find
from self_tests.planted_bugs.many_ranks import REPLICATED64 as MANY
from self_tests.planted_bugs.plant import EP2, SINGLE, TP2_EP2
from self_tests.spec.deciding import Judgement, KeptTwins
from self_tests.trial_runs import DEADLINE_S, PRELOAD

_GROUPS = {"group_lists", "group_answers", "size_answers"}  # fixtures of checks for which nothing runs


@dataclass(frozen=True)
class Case:
    """A run of native or of a planted bug; without a workload the backend is only asked for groups."""

    backend: str  # "native", the name of a planted bug, or a correct backend as pkg.mod:Class
    variant: str
    layout: Layout
    workload: str

    def __str__(self) -> str:
        """As it is stored: `native alltoall ep2 even`."""
        return f"{self.backend} {self.variant} {self.layout.name} {self.workload}".rstrip()

    @property
    def path(self) -> str:
        """The backend as the registry knows it."""
        return self.backend if self.backend == NATIVE or ":" in self.backend else find(self.backend).backend

    def drawn(self) -> Workload:
        """Draw the workload, and no other of its variant and layout."""
        place = self.variant, self.layout
        asked = (each for each in scripts.chapters() if self.workload in each.names)
        drawn = chain(
            (workload for chapter in asked for workload in chapter.drawn(*place, "full")),
            recipes.corpus(*place, "quick", lambda name: name == self.workload),
            routers.routing_corpus(*place),
            virtual.corpus(*place),
        )
        return next(workload for workload in drawn if workload.name == self.workload)


# Cases beyond those of planted bugs: of backends whose claims differ from native's, or that honour what native refuses,
# and of other workloads.
_HONOURED = ("08", "09", "10", "11", "12", "13", "14", "16", "17", "18", "20", "21", "22")
_HONOURING = "self_tests.correct_backends.unusual_configuration:Honouring"
CLAIMED = (
    ("BIAS-07", Case("self_tests.correct_backends.unusual_balance:ForcedToo", "alltoall", SINGLE, "bias-forced-dealt")),
    ("EXCH-36", Case("self_tests.chapters.tp_duplicated_tokens.plants:Parts", "alltoall", TP2_EP2, "copies-even")),
    ("COST-03", Case(NATIVE, "allgather", EP2, "even")),
    ("COST-04", Case(NATIVE, "allgather", EP2, "even")),
    ("COST-03", Case("self_tests.correct_backends.unusual:FullWire", "alltoall", EP2, "uneven")),
    ("COST-04", Case("self_tests.correct_backends.unusual:FullWire", "alltoall", EP2, "uneven")),
    ("GRAD-02", Case(NATIVE, "alltoall", SINGLE, "permute")),
    ("GROUP-06", Case(NATIVE, "alltoall", MANY, "many-ranks-uneven")),
    ("GROUP-06", Case(NATIVE, "alltoall", MANY, "own-many-ranks-uneven")),
    ("LOSS-18", Case("self_tests.correct_backends.unusual_losses:Returned", "alltoall", SINGLE, "losses-layers-top-1")),
    *((f"RULE-{number}", Case(_HONOURING, "alltoall", SINGLE, f"rule-{number}")) for number in _HONOURED),
)


@cache
def cases() -> dict[str, dict[str, Case]]:
    """Return by requirement the cases on which planted bugs violate it, by name: of native first."""
    found: dict[str, dict[str, Case]] = {}
    for bugs in (False, True):
        for plant, expected in EXPECTED:
            backend = plant.name if bugs else NATIVE
            case = Case(backend, variant_for(plant, expected), plant.layout, expected.workload)
            found.setdefault(expected.requirement, {})[str(case)] = case
    for id, case in CLAIMED:
        assert id in by_requirement(), id
        found.setdefault(id, {})[str(case)] = case
    return found


class Bench:
    """Runs cases on ranks, and gives the checks that read them."""

    def __init__(self) -> None:
        """Start no ranks yet."""
        self.engine, self.virtual = Engine(preload=PRELOAD), Engine(virtual=True, preload=PRELOAD)

    def judgements(self, case: Case, requirements: list[str]) -> dict[str, list[Judgement]]:
        """Run a case once, and return the checks of each requirement that read it."""
        if not case.workload:
            return self._of_groups(case, requirements)
        engine = self.virtual if case.layout == MANY else self.engine
        workload, step = case.drawn(), partial(moe_step, engine, case.path, deadline_s=DEADLINE_S)
        stored, backend = pickle.dumps({"outcome": step(workload)}), registry.load(case.path)
        twins = KeptTwins(Twins(backend, "cpu", lambda some: [step(each) for each in some], engine.renew))
        return {
            each: [Judgement(check, stored, twins) for check in by_requirement()[each] if check.reads(workload)]
            for each in requirements
        }

    def close(self) -> None:
        """End all ranks."""
        self.engine.close()
        self.virtual.close()

    def _of_groups(self, case: Case, requirements: list[str]) -> dict[str, list[Judgement]]:
        world = case.layout.world
        wishes = tuple(Wish(each) for each in (*sizes.possible(world), *sizes.impossible(world)))
        told = dict(zip(wishes, group_lists(self.engine, case.path, wishes), strict=True))
        given = {"group_lists": {case.layout: told[Wish(case.layout)].lists}, "group_answers": told}
        stored = pickle.dumps(given | {"size_answers": told})
        return {
            each: [Judgement(check, stored) for check in by_requirement()[each] if check.arguments & _GROUPS]
            for each in requirements
        }


def seen(judgements: list[Judgement], oracles: Collection[str]) -> dict[str, bool]:
    """Return of those of some oracles that judgements call whether they decide one of them."""
    found: dict[str, bool] = {}
    for judgement in judgements:
        for oracle in sorted(judgement.called(oracles)):
            found[oracle] = found.get(oracle, False) or judgement.decided_by(oracle)
    return found
