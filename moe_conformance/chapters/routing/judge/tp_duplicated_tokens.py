"""Judge of tokens that all ranks of a tensor parallel group hold: every rank must route them equally."""

from __future__ import annotations

from torch import Tensor

from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.router.routers import expected_of
from moe_conformance.judging.verdict import Tally, WrongForm, WrongSelection, WrongWeight


def judge_copies(reading: Reading, tally: Tally) -> None:
    """Decide whether all tp ranks give a token the same experts and bitwise equal weights, in any slot order.

    For workloads in which the ranks of every tensor parallel group hold the same tokens.

    Raises:
        WrongForm: ids or weights are not (T, K).
        WrongSelection: a rank selects other experts than the first of its group.
        WrongWeight: a rank selects the same experts with other weights.
    """
    workload = reading.outcome.workload
    chosen, weighed = list[Finding](), list[Finding]()
    for m in range(len(workload.batches)):
        for first, *others in workload.layout.groups()["tp"]:
            ids_TK, weights_TK = _by_expert(reading, (m, first))
            for rank in others:
                copied_ids_TK, copied_weights_TK = _by_expert(reading, (m, rank))
                other_T = (copied_ids_TK != ids_TK).any(1)
                for t in other_T.nonzero().flatten().tolist():
                    has = f"{ids_TK[t].tolist()} and {copied_ids_TK[t].tolist()}"
                    chosen.append(_copy_finding("select", first, rank, t, has))
                for t in ((copied_weights_TK != weights_TK).any(1) & ~other_T).nonzero().flatten().tolist():
                    has = f"{weights_TK[t].tolist()} and {copied_weights_TK[t].tolist()}"
                    weighed.append(_copy_finding("give it the weights", first, rank, t, has))
                tally.add(pairs=ids_TK.numel(), rank=rank)
            tally.add(pairs=ids_TK.numel(), rank=first)
    if chosen:
        fail(WrongSelection, "route", chosen)
    if weighed:
        fail(WrongWeight, "route", weighed)


def _by_expert(reading: Reading, place: Place) -> tuple[Tensor, Tensor]:
    """Return ids and weights, each token's slots by ascending expert."""
    ids_TK, order_TK = expected_of(reading).ids[place].sort(dim=1)
    weights_TK = reading.seen(*place).router.weights_TK
    if weights_TK is None or weights_TK.shape != ids_TK.shape:
        sentence = f"the weights of rank {place[1]} do not have the shape {tuple(ids_TK.shape)} of the ids"
        raise WrongForm("route", sentence, ranks=(place[1],))
    return ids_TK, weights_TK.gather(1, order_TK)


def _copy_finding(verb: str, first: int, rank: int, t: int, has: str) -> Finding:
    return Finding(verb, f"tp ranks {first} and {rank} hold the same token {t} and {verb} {has}", (first, rank))
