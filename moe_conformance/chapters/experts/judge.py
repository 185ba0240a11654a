"""Judge of the parts of experts: gate, up and down are sharded alike over etp, and a new model has distinct ones."""

from __future__ import annotations

from moe_conformance.judging.comparisons import Comparison, Comparisons, Start, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Shard, stages
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.verdict import Uncovered, WrongParameter
from moe_conformance.reference.experts import Part, Problem, problems
from moe_conformance.scenarios.outcome import Outcome, RankOutcome

_CUT = {"gate": 0, "up": 0, "down": 1}  # the dimension of size F


@judge(Uncovered, "experts")
def judge_matching_parts(reading: Reading) -> Comparisons:
    """Decide whether every rank holds the same part of F of an expert's gate, up and down.

    Counts the experts.

    Raises:
        Uncovered: a matrix is whole while others are sharded, is another shard, or is cut along another dimension.
    """
    for rank in reading.ranks:
        for expert, shards in sorted(_held(rank).items()):
            parts = {shard and shard[1:] for shard in shards.values()}
            if len(parts) > 1 or any(shard and shard[0] != _CUT[name] for name, shard in shards.items()):
                words = ", ".join(f"{_words(shard)} of {name}" for name, shard in shards.items())
                sentence = f"rank {rank.rank} holds different shards of the matrices of expert {expert}: {words}"
                yield Finding("parts", sentence, (rank.rank,))
            yield Comparison(rank.rank, pairs=1)


def _held(rank: RankOutcome) -> dict[int, dict[str, Shard]]:
    """Return the shards of every expert's matrices."""
    held: dict[int, dict[str, Shard]] = {}
    for (name, expert), grad in rank.grads_local.items():
        if name in _CUT and expert is not None:
            held.setdefault(expert, {})[name] = grad.shard
    return held


def _words(shard: Shard) -> str:
    if shard is None:
        return "all"
    dim, index, of = shard
    return f"part {index} of {of} along dimension {dim}"


@judge(WrongParameter, "run")
def judge_initial_experts(outcome: Outcome) -> Comparisons:
    """Decide whether experts of a new model differ, and are the same bytes on all ranks that hold them.

    Raises:
        Uncovered: the ranks of a pipeline stage do not name all experts.
        WrongParameter: a parameter is not finite, replicas differ, or different parts are equal.
    """
    experts, named = outcome.workload.config.experts, values(outcome, 0, "parameters")
    parts = []
    for stage, ranks in enumerate(stages(outcome.workload.layout)):
        held = [
            Part(rank, stage, parameter["name"], parameter["expert"], parameter["shard"], parameter["value"])
            for rank in ranks
            for parameter in named[rank]
        ]
        for name in ("up", "down"):
            missing = set(range(experts)) - {part.expert for part in held if part.name == name}
            if missing:
                sentence = f"no rank of {list(ranks)} names {name} of expert {min(missing)}"
                raise Uncovered("experts", sentence, ranks=ranks)
        parts += held
    yield Start("in a new model, ")
    for part in parts:
        yield Comparison(part.rank, elements=part.value.numel())
    yield from (_finding(parts, problem) for problem in problems(parts))


def _finding(parts: list[Part], problem: Problem) -> Finding:
    """Put a problem into words."""
    part = parts[problem.part]
    place = f"{part.name} of {_owner(part)} on rank {part.rank}"
    if problem.kind == "constant":
        sentence = f"all matrices of expert {part.expert} on rank {part.rank} are constant; expected: drawn at random"
        return Finding(problem.kind, sentence, (part.rank,))
    if problem.other is None:
        return Finding(problem.kind, f"{place} is not finite", (part.rank,))
    other, ranks = parts[problem.other], (parts[problem.other].rank, part.rank)
    if problem.kind == "replica differs":
        sentence = f"{place} differs from that of its replica on rank {other.rank}{_difference(part, other)}"
        return Finding(problem.kind, f"{sentence}; likely cause: replicas draw from different random states", ranks)
    equal, of = int((part.value == other.value).sum()), part.value.numel()
    sentence = f"{place} equals that of {_owner(other)} on rank {other.rank} in {equal} of {of} elements"
    kind, cause = _cause(part, other)
    return Finding(kind, f"{sentence}; expected: fewer than half; likely cause: {cause}", ranks)


def _owner(part: Part) -> str:
    shard = "" if part.shard is None or part.shard[2] == 1 else f" (part {part.shard[1]} of {part.shard[2]})"
    return f"expert {part.expert}{shard}"


def _difference(part: Part, other: Part) -> str:
    """Say where two replicas differ first."""
    if (part.value.shape, part.value.dtype) != (other.value.shape, other.value.dtype):
        return f": {tuple(part.value.shape)} {part.value.dtype} and {tuple(other.value.shape)} {other.value.dtype}"
    different = (part.value != other.value).nonzero()
    if not len(different):
        return " in the sign of a zero"
    at = tuple(different[0].tolist())
    return f": {float(part.value[at]):.6g} and {float(other.value[at]):.6g} at {list(at)}"


def _cause(part: Part, other: Part) -> tuple[str, str]:
    """Return the kind of an equality of parts that have to differ, and its likely cause."""
    if part.expert == other.expert:
        return "etp", "all ranks of etp draw from the same random state"
    if part.rank == other.rank:
        return "rank", "one draw is used for several experts"
    return "ep", "all ranks of ep draw from the same random state"
