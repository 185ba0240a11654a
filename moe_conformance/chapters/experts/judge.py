"""Parts of experts that are cut over etp: whether gate, up and down are cut alike, so that their answers add up."""

from __future__ import annotations

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Shard
from moe_conformance.judging.verdict import Tally, Uncovered
from moe_conformance.scenarios.outcome import RankOutcome

_CUT = {"gate": 0, "up": 0, "down": 1}  # the dimension that is as long as F


def judge_matching_parts(reading: Reading, tally: Tally) -> None:
    """Decide whether every rank holds the same part of F of an expert's gate, up and down. Counts experts.

    Raises:
        Uncovered: a matrix is whole while others are sharded, is another shard, or is cut along another dimension.
    """
    findings = []
    for rank in reading.ranks:
        for expert, shards in sorted(_held(rank).items()):
            parts = {shard and shard[1:] for shard in shards.values()}
            if len(parts) > 1 or any(shard and shard[0] != _CUT[name] for name, shard in shards.items()):
                said = ", ".join(f"{_words(shard)} of {name}" for name, shard in shards.items())
                findings.append(
                    Finding(
                        "parts",
                        f"rank {rank.rank} holds different shards of the matrices of expert {expert}: {said}",
                        (rank.rank,),
                    )
                )
            else:
                tally.add(pairs=1, rank=rank.rank)
    if findings:
        fail(Uncovered, "experts", findings)


def _held(rank: RankOutcome) -> dict[int, dict[str, Shard]]:
    """Return the parts of the matrices of every expert."""
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
