"""Judges of the low-latency token exchange: places of its receive buffer, sums of combine, exceeded limits.

The signs of rows are tags (see `records.tags`), so that each row identifies its token, also after rounding. N experts
held, C places, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_conformance.chapters.token_exchange.judge.token_exchange import Script, Token, unlike
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, some
from moe_conformance.judging.observed.script import answers, judge_refused, values
from moe_conformance.judging.shared.exchange.expert_placement import judge_placement
from moe_conformance.judging.verdict import Tally, WrongDelivery, WrongForm
from moe_conformance.reference.token_exchange.combine_rules import combine
from moe_conformance.reference.token_exchange.fixed_places import Places, legal_places
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.workload import Ref


def judge_places(outcome: Outcome, tally: Tally) -> None:
    """Decide whether the first places of every expert hold its rows, and other places change no result.

    Raises:
        WrongGroups: an expert is held nowhere, or twice.
        WrongForm: an expert has another number of places on another rank, or for another load, with one tokens_max; or
            rows or outputs have another dtype than the tokens.
        WrongDelivery: places, counts or runs are wrong.
        WrongOutput, WrongGradient, AbsentGradient: the sums of combine, or their gradients, are wrong.
    """
    with tally.uncounted() as uncounted:
        judge_placement(outcome, uncounted)
    for number, call in enumerate(outcome.workload.calls):
        if call.method == "dispatch" and not call.may_raise:
            _judge_dispatch(outcome, tally, number)
    _judge_fixed(outcome)
    _judge_sums(outcome, tally)


def judge_limit(outcome: Outcome, tally: Tally) -> None:
    """Decide whether more tokens than tokens_max are refused on every rank, and fewer are accepted.

    Raises:
        Unrefused: some ranks accepted them.
        WrongDelivery, WrongOutput, WrongGradient, AbsentGradient: a dispatch within the limit is wrong.
    """
    judge_places(outcome, tally)
    for number, call in enumerate(outcome.workload.calls):
        if call.may_raise:
            most = max(len(given["x_TD"]) for given in call.given)
            asked = f"{most} tokens on a rank, above tokens_max = {call.given[0]['tokens_max']} (call {number})"
            judge_refused(outcome, number, tally, stage="dispatch", asked=asked)


@judge(WrongDelivery, "dispatch")
def _judge_dispatch(outcome: Outcome, number: int) -> Comparisons:
    answered, given = answers(outcome, number), outcome.workload.calls[number].given
    values(outcome, number, "counts_N")  # raises if a rank raised
    for rank, group, held in _ranks(outcome):
        where, rows_NCD = f"call {number}: rank {rank}", answered[rank].values["rows_NCD"]
        places, runs = _places(outcome, number, rank, group, held)
        ids = [given[s]["ids_TK"] for s in group]
        for n, legal in enumerate(legal_places(places, ids, held, runs=runs)):
            if not legal:
                yield Comparison(rank, _places_finding(where, n, places, ids, group, held, runs))
                continue
            for c in range(int(places.counts_N[n])):
                token = Token(group[int(places.source_NC[n, c])], int(places.token_NC[n, c]))
                row_D, sent_D = rows_NCD[n, c], given[token.source]["x_TD"][token.token]
                if not torch.equal(row_D, sent_D):
                    sentence = f"{where} has {token} in place {c} of expert {held[n]}, but {unlike(row_D, sent_D)}"
                    yield Comparison(rank, Finding("changed", sentence, (rank,)))
            yield Comparison(rank, pairs=int(places.counts_N[n]), elements=1)


def _places(
    outcome: Outcome, number: int, rank: int, group: tuple[int, ...], held: tuple[int, ...]
) -> tuple[Places, bool]:
    """Return the places of a rank's experts, and whether the rank reports runs.

    Raises:
        WrongForm: the places are of other experts or have another dtype than the tokens.
    """
    answer, where = answers(outcome, number)[rank].values, f"call {number}: rank {rank}"
    rows_NCD, counts_N = answer["rows_NCD"], answer["counts_N"]
    N, C = rows_NCD.shape[:2]
    if N != len(held) or not C or bool((counts_N > C).any()) or len(counts_N) != N:
        sentence = f"{where} has places of shape {tuple(rows_NCD.shape)} and counts {counts_N.tolist()}"
        needed = f"{len(held)} experts, one place or more for each, and counts of at most {C}"
        raise WrongForm("dispatch", f"{sentence}; expected {needed}", ranks=(rank,))
    if rows_NCD.dtype != (dtype := outcome.workload.config.dtype):
        sentence = f"{where} receives rows of {rows_NCD.dtype} instead of {dtype}, the dtype of the tokens"
        raise WrongForm("dispatch", sentence, ranks=(rank,))
    said = tags.decode(rows_NCD.reshape(N * C, -1).sign())
    known_R = (said.kind_R == tags.TAG) & (said.microbatch_R == number)
    place = torch.tensor([group.index(s) if s in group else -2 for s in said.rank_R.tolist()], dtype=torch.int64)
    source_NC = torch.where(known_R, place, -2).reshape(N, C)
    token_NC = torch.where(known_R, said.token_R, -2).reshape(N, C)
    runs = answer.get("run_NW") is not None
    zeros = torch.zeros(N, len(group), dtype=torch.int64)
    begin_NW, run_NW = (answer["begin_NW"], answer["run_NW"]) if runs else (zeros, zeros)
    return Places(source_NC, token_NC, counts_N, begin_NW, run_NW), runs


def _judge_fixed(outcome: Outcome) -> None:
    """Raise unless the number of places of an expert is equal on all ranks and calls with one tokens_max."""
    places: dict[tuple[tuple[int, ...], int], dict[str, int]] = {}
    for number, call in enumerate(outcome.workload.calls):
        if call.method == "dispatch" and not call.may_raise:
            rows = values(outcome, number, "rows_NCD")
            for rank, group, _ in _ranks(outcome):
                known = places.setdefault((group, call.given[rank]["tokens_max"]), {})
                known[f"{rows[rank].shape[1]} on rank {rank} in call {number}"] = rows[rank].shape[1]
    for (_, most), known in places.items():
        if len(set(known.values())) > 1:
            sentence = f"the number of places per expert differs with one tokens_max = {most}: {some(list(known))}"
            raise WrongForm("dispatch", sentence)


def _places_finding(
    where: str, n: int, places: Places, ids: list[Tensor], group: tuple[int, ...], held: tuple[int, ...], runs: bool
) -> Finding:
    """Return a finding about the places of an expert, observed and expected."""
    count, expert = int(places.counts_N[n]), held[n]
    wanted = sorted((s, t) for s, ids_TK in enumerate(ids) for t in (ids_TK == expert).nonzero()[:, 0].tolist())
    stands = list(zip(places.source_NC[n, :count].tolist(), places.token_NC[n, :count].tolist(), strict=True))
    rank = int(where.split()[-1])
    if count != len(wanted):
        return Finding("count", f"{where} reports {count} rows for expert {expert} instead of {len(wanted)}", (rank,))
    if sorted(stands) != wanted:
        lost = next(slot for slot in wanted if slot not in stands)
        at = next(i for i, slot in enumerate(stands) if slot not in wanted or stands.index(slot) != i)
        is_there = f"rank {group[stands[at][0]]} token {stands[at][1]}" if stands[at][0] >= 0 else "a row of no token"
        missing = f"rank {group[lost[0]]} token {lost[1]} is missing"
        return Finding("rows", f"{where} has {is_there} in place {at} of expert {expert}, and {missing}", (rank,))
    assert runs
    runs_S = [(int(places.begin_NS[n, s]), int(places.run_NS[n, s])) for s in range(len(group))]
    reported = f"reports the runs (begin, length) {runs_S} of expert {expert} for the source ranks {list(group)}"
    sources = [group[s] for s, _ in stands]
    return Finding("runs", f"{where} {reported}; the source ranks of its places are {sources}", (rank,))


def _ranks(outcome: Outcome) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield every rank with its exchange group and its experts."""
    group_of = {rank: group for group in outcome.workload.layout.groups()["ep_etp"] for rank in group}
    for rank in sorted(outcome.ranks, key=lambda rank: rank.rank):
        yield rank.rank, group_of[rank.rank], rank.local_experts


def _judge_sums(outcome: Outcome, tally: Tally) -> None:
    """Compare y and gradients with the weighted sum of a token's own row, once per shard that returns it."""
    shards = outcome.workload.layout.etp
    script = Script(outcome)
    for number, call in enumerate(outcome.workload.calls):
        if call.method != "combine":
            continue
        ref = call.given[0]["handle"]
        assert isinstance(ref, Ref)
        outputs, of_tokens, of_weights = [], [], []
        for rank, given in enumerate(script.call(ref.call).given):
            x_TD = given["x_TD"].to(torch.float64, copy=True).requires_grad_()
            weights_TK = call.given[rank]["weights_TK"].to(torch.float64, copy=True).requires_grad_()
            rows_TKD = (shards * x_TD).unsqueeze(1).expand(-1, weights_TK.shape[1], -1)
            y_TD = combine(rows_TKD, given["ids_TK"], weights_TK)
            dx_TD, dweights_TK = torch.autograd.grad(y_TD, (x_TD, weights_TK), call.upstream[rank][""].double())
            outputs.append(y_TD.detach())
            of_tokens.append(dx_TD)
            of_weights.append(dweights_TK)
        script.judge_output(tally, number, outputs)
        through = f"through call {number}"
        script.judge_gradients(tally, ref.call, "x_TD", of_tokens, f"the gradient of the tokens {through}")
        script.judge_gradients(tally, number, "weights_TK", of_weights, f"the gradient of the weights {through}")
