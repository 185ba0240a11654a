"""Repetitions of a run that must give the same: after other runs, with other random states, with late ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from moe_conformance.workloads import laws
from moe_conformance.workloads import recipes as corpus
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep
from moe_conformance.workloads.records.workload import Twist, Workload
from moe_conformance.workloads.twins import Twin, rows_of, the_same, twin


def in_turn(workload: Workload) -> list[Twin]:
    """Return twins of two steps, each of which follows a step of another exchange that is built too.

    Experts are interleaved with experts of float64 in the quick profile too, which must not change their precision.
    """
    run = ExpertsStep() if workload.parameters else ExchangeStep()
    recipes = corpus.EXPERTS if workload.parameters else corpus.PROBE
    names = ["odd-experts-even", "one-expert-even"]
    if workload.likened == "full":
        names += ["even", "even-bfloat16", "even-float64", "rank-without-tokens"]
    elif workload.parameters:
        names.append("even-float64")
    prefix = "own-" if workload.parameters else ""
    others = [recipe for recipe in recipes if recipe.name in [prefix + name for name in names]]
    built = [corpus.exchange_workload(other, run, workload.config.variant, workload.layout) for other in others]
    return [
        twin(
            workload,
            f"in turn with {other.name}",
            the_same(workload) * 2,
            bits=True,
            schedule=_twice(workload),
            twist=Twist(beside=(other,)),
        )
        for other in built
    ]


def deterministic(workload: Workload) -> Twin:
    """Return the twin with deterministic algorithms, with which other such twins are compared; it may be refused."""
    return replace(twin(workload, "with deterministic algorithms", twist=Twist(deterministic=True)), anew=True)


def with_deterministic(twins: Callable[[Workload], Sequence[Twin]]) -> Callable[[Workload], Sequence[Twin]]:
    """Return a function of a workload: it gives the twin with deterministic algorithms, and then `twins(workload)`."""
    return lambda workload: [deterministic(workload), *twins(workload)]


def again(workload: Workload) -> list[Twin]:
    """Return a twin in new processes, with deterministic algorithms."""
    return [twin(workload, "in fresh processes", bits=True, fresh=True, twist=Twist(deterministic=True))]


def afresh(workload: Workload) -> list[Twin]:
    """Return two twins, each in new processes, with deterministic algorithms."""
    (other,) = again(workload)
    return [replace(other, how="in other fresh processes", anew=True), other]


def recomputed(workload: Workload) -> list[Twin]:
    """Return twins with two microbatches in flight, the second with reversed tokens, without and with recomputation.

    In the full profile also recompute forwards of one microbatch, and experts alone.
    """
    (same,) = the_same(workload)
    behind = tuple(
        rows_of([(0, rank, t) for t in reversed(range(len(rows.source_T3)))], workload)
        for rank, rows in enumerate(same)
    )
    plain = twin(workload, "with two in flight", (same, behind), finals=False, schedule="F0 F1 B0 B1")
    how, again = "with activation recomputation", Twist(recomputed="all")
    made = [plain, twin(plain.workload, f"{how} of two microbatches in flight", bits=True, twist=again)]
    if workload.likened == "full":
        made.append(twin(workload, how, bits=True, twist=again))
        made.append(twin(workload, f"{how} of experts", bits=True, twist=Twist(recomputed="experts")))
    return made


def recomputed_layers(workload: Workload) -> list[Twin]:
    """Return a twin that recomputes the whole layer."""
    return [twin(workload, "with activation recomputation", bits=True, twist=Twist(recomputed="all"))]


def recomputed_noise(workload: Workload) -> list[Twin]:
    """Return twins without and with recomputation, from the same state of all random generators.

    Forced routing may have further generators: then they run in new processes.
    """
    fresh, seed = bool(workload.config.routing.forced), 20_000
    return [
        replace(twin(workload, "without recomputation", fresh=fresh, twist=Twist(seed=seed)), anew=True),
        twin(
            workload,
            "with activation recomputation",
            bits=True,
            fresh=fresh,
            twist=Twist(seed=seed, recomputed="all"),
        ),
    ]


def behind_inference(workload: Workload) -> list[Twin]:
    """Return a twin after a forward in inference mode, the first of new processes, whose state may persist."""
    how = "behind the first forward of new processes, in inference mode"
    return [twin(workload, how, the_same(workload) * 2, fresh=True, schedule="I0 F1 B1")]


def lifetime(workload: Workload) -> list[Twin]:
    """Return a twin in new processes that compares settings from the import of the backend to the session's end."""
    how = "from import to closing"
    return [twin(workload, how, bits=True, fresh=True, twist=Twist(lifetime="process"))]


def twice(workload: Workload) -> list[Twin]:
    """Return twins that run the same step twice, in the full profile also as the first steps of new processes."""
    places = [False, True] if workload.likened == "full" else [False]
    return [
        twin(
            workload,
            "twice over" + (" in fresh processes" if fresh else ""),
            the_same(workload) * 2,
            bits=True,
            fresh=fresh,
            schedule=_twice(workload),
        )
        for fresh in places
    ]


def _twice(workload: Workload) -> str:
    """Return the schedule of two steps of a workload of one microbatch, gradients set to None in between."""
    return f"{workload.schedule} S {workload.schedule.replace('0', '1')}"


def cleared(workload: Workload) -> list[Twin]:
    """Return one twin for each microbatch alone, and one of separate steps with gradients set to zero in between."""
    schedule = " Z ".join(f"F{m} B{m}" for m in range(len(workload.batches)))
    steps = twin(workload, "with every microbatch a step of its own", finals=False, schedule=schedule)
    return [*laws.alone(workload), steps]


def seeded(workload: Workload) -> list[Twin]:
    """Return twins with other seeds of all random generators before the step."""
    seeds = (1, 20_000) if workload.likened == "full" else (20_000,)
    return [twin(workload, f"with random seed {seed}", bits=True, twist=Twist(seed=seed)) for seed in seeds]


def behind_draws(workload: Workload) -> list[Twin]:
    """Return twins in new processes, without and with numbers drawn from all random generators before."""
    how = "in fresh processes, behind draws of others"
    first, _ = afresh(workload)
    return [first, twin(workload, how, bits=True, fresh=True, twist=Twist(deterministic=True, drawn=True))]


def delayed(workload: Workload) -> list[Twin]:
    """Return twins in which later ranks are late, or earlier ones, with deterministic algorithms.

    The delays are far longer than those of a busy machine.
    """
    world = workload.layout.world
    late = tuple(0.03 * rank for rank in range(world))
    return [
        twin(workload, f"with rank {last} late", bits=True, twist=Twist(late=seconds, deterministic=True))
        for last, seconds in {world - 1: late, 0: late[::-1]}.items()  # of one rank, once
    ]
