"""Padding to a common token count: the count, whom it is asked of, and bounds that some rank breaks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from moe_conformance.engine.ledger.entry import Entry, group_words
from moe_conformance.judging.answers import answers, values
from moe_conformance.judging.diagnosis import count, some
from moe_conformance.judging.reading import Reading
from moe_conformance.judging.traffic import by_phase, carries_rows
from moe_conformance.judging.verdict import (
    NotOffered,
    Raised,
    Tally,
    Unrefused,
    WrongCollectives,
    WrongCount,
    WrongDelivery,
    WrongForm,
)
from moe_conformance.scenarios.outcome import Outcome, RankOutcome
from moe_conformance.workloads import tags
from reference import packing, padding_bounds


def judge_padded_counts(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every rank pads to the largest token count of its exchange group, rounded up; or to the bound.

    Raises:
        WrongCount: a rank pads to another number.
    """
    groups, found = outcome.workload.layout.groups(), []
    for number, tokens in enumerate(_tokens(outcome)):
        expected = _expected(outcome, tokens, groups["ep_etp"])
        for rank, P in enumerate(values(outcome, number)):
            if P == expected[rank]:
                tally.add(pairs=1, rank=rank)
                continue
            mistaken = [name for name in groups if _expected(outcome, tokens, groups[name])[rank] == P]
            as_of = f", as its {mistaken[0]} group would need" if mistaken else ""
            of = next(group for group in groups["ep_etp"] if rank in group)
            counts = ", ".join(str(tokens[other]) for other in of)
            padded = f"rank {rank} pads {tokens[rank]} tokens to {P} rows{as_of}"
            found.append(f"{padded}: {counts} tokens in its exchange {group_words(of)} take {expected[rank]}")
    if found:
        raise WrongCount("dispatch", some(found))


def judge_alignment(outcome: Outcome, tally: Tally) -> None:
    """Decide whether every padded count is a multiple of the one alignment that was asked for, and is stated.

    Raises:
        WrongForm: the padding states another alignment, or none.
        WrongCount: a count is no multiple.
    """
    A, found = outcome.workload.config.token_alignment, []
    for each in outcome.ranks:
        if (stated := each.resolved.get("alignment")) != str(A):
            raise WrongForm("dispatch", f"rank {each.rank} states the alignment {stated}, asked for was {A}")
    for number, tokens in enumerate(_tokens(outcome)):
        for rank, P in enumerate(values(outcome, number)):
            if P % A:
                found.append(f"rank {rank} pads {tokens[rank]} tokens to {P} rows, which is no multiple of {A}")
            tally.add(pairs=1, rank=rank)
    if found:
        raise WrongCount("dispatch", some(found))


def judge_asked_group(reading: Reading, tally: Tally) -> None:
    """Decide whether the largest token count is asked of the exchange group, and of no other.

    Raises:
        WrongCollectives: it is asked of other ranks.
        NotOffered: the ledger shows no such call; the count is learnt in another way.
    """
    groups, found, calls = reading.outcome.workload.layout.groups(), [], 0
    for rank in reading.ranks:
        of = next(group for group in groups["ep_etp"] if rank.rank in group)
        for phase, entry in _asked(reading, rank):
            calls += 1
            if entry.ranks != of:
                name = next((name for name in groups if entry.ranks in groups[name]), "no")
                asked = f"rank {rank.rank} asks {group_words(entry.ranks)}, its {name} group, for the largest count"
                found.append(f"{asked} of tokens in {phase}: its rows travel in {group_words(of)}")
            tally.add(pairs=1, rank=rank.rank)
    if found:
        raise WrongCollectives("dispatch", some(found))
    if not calls:
        raise NotOffered("the ledger shows no all-reduce for the largest of some numbers before rows travel")


def judge_nobody_asked(reading: Reading, tally: Tally) -> None:
    """Decide whether a dispatch asks no rank for the largest token count.

    Raises:
        WrongCollectives: it does.
        NotOffered: the backend hands over a static number of rows, which all have to agree upon.
    """
    found = []
    if reading.ranks[0].resolved.get("handed") == "static":
        raise NotOffered("the backend hands over a static number of rows, and asks for the largest count for that")
    for rank in reading.ranks:
        for phase, entry in _asked(reading, rank):
            asked = f"rank {rank.rank} asks {group_words(entry.ranks)} for the largest of some numbers"
            found.append(f"{asked} in {phase}, before any row travels ({entry.where})")
        tally.add(pairs=len(reading.batches), rank=rank.rank)
    if found:
        raise WrongCollectives("dispatch", some(found))


def require_own_size(reading: Reading) -> None:
    """Raise unless what an exchange hands over has the size of its own rows, so that it need not know the others' T.

    Raises:
        NotOffered: it hands over a buffer of one size on all ranks.
    """
    if reading.ranks[0].resolved.get("handed") == "static":
        raise NotOffered("the exchange hands over as many places on every rank, and asks for the largest count itself")


def require_unpadded(reading: Reading) -> None:
    """Raise unless an exchange that was not asked to pad does not: one that needs equal counts may.

    Raises:
        NotOffered: it pads of its own need.
    """
    padding = reading.ranks[0].resolved.get("padding", "no")
    if padding != "no":
        raise NotOffered(f"the exchange needs equal token counts, and pads them ({padding}) though it is not asked to")


def judge_added_rows(reading: Reading, tally: Tally) -> None:
    """Decide whether no expert is handed a row of zeros, which is what an added row is.

    Raises:
        WrongDelivery: one is.
    """
    found = Counter((entry.rank, entry.expert) for entry in reading.entries if entry.kind == tags.PADDING)
    if found:
        told = [f"rank {rank} is handed {count(n, 'row')} of zeros for expert {e}" for (rank, e), n in found.items()]
        raise WrongDelivery("dispatch", f"{some(told)}: rows that were added are routed")
    for rank in reading.ranks:
        tally.add(pairs=len(rank.microbatches), rank=rank.rank)


def judge_broken_bound(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a dispatch raises on all ranks of a group in which some T is larger than the bound, and then only.

    Raises:
        Unrefused: some rank answered.
        Raised: one refused a bound that holds, or does not say what broke it.
    """
    config, groups = outcome.workload.config, outcome.workload.layout.groups()["ep_etp"]
    bound = config.token_bound
    assert bound is not None
    for number, call in enumerate(outcome.workload.calls):
        tokens = [len(given["x"]) for given in call.given]
        found = answers(outcome, number)
        refused = [answer.raised for answer in found]
        legal = padding_bounds.legal_refusals(refused, tokens, groups, bound, alignment=config.token_alignment)
        for group, well in zip(groups, legal, strict=True):
            if not well:
                _tell_refusals(group, tokens, refused, [answer.error for answer in found], bound)
        for rank, answer in enumerate(found):
            named = {str(tokens[rank]), str(bound)} <= set(re.findall(r"\d+", answer.error))
            if answer.raised and tokens[rank] > bound and not named:
                sentence = f"rank {rank} has {tokens[rank]} tokens and the bound is {bound}; its error names not both"
                raise Raised("dispatch", f"{sentence}: {answer.error}", ranks=(rank,))
            tally.add(pairs=1, rank=rank)


def _tell_refusals(
    group: Sequence[int], tokens: Sequence[int], refused: Sequence[bool], errors: Sequence[str], bound: int
) -> None:
    largest = max(tokens[rank] for rank in group)
    ranks = tuple(rank for rank in group if refused[rank] is (largest <= bound))
    if largest <= bound:
        sentence = f"rank {ranks[0]} refuses, though no rank of its {group_words(tuple(group))} has over {bound} tokens"
        raise Raised("dispatch", f"{sentence}: {errors[ranks[0]]}", ranks=ranks)
    whose = next(rank for rank in group if tokens[rank] == largest)
    answered = some([f"rank {rank}" for rank in ranks])
    sentence = f"rank {whose} has {largest} tokens and the bound is {bound}, and dispatch answered on {answered}"
    raise Unrefused("dispatch", sentence, ranks=ranks)


def _tokens(outcome: Outcome) -> list[list[int]]:
    return [[given["tokens"] for given in call.given] for call in outcome.workload.calls]


def _expected(outcome: Outcome, tokens: Sequence[int], groups: Sequence[Sequence[int]]) -> Sequence[int]:
    config = outcome.workload.config
    if config.pad_tokens == "bound":
        assert config.token_bound is not None
        return [padding_bounds.bounded_count(config.token_bound, alignment=config.token_alignment)] * len(tokens)
    return packing.padded_counts(tokens, groups, alignment=config.token_alignment)


def _asked(reading: Reading, rank: RankOutcome) -> Iterator[tuple[str, Entry]]:
    """List the reductions to the largest of some integers before the rows of a dispatch travel, each with its phase."""
    hidden = reading.outcome.workload.config.hidden
    for phase, calls in by_phase(rank).items():
        if phase.partition(":")[0] not in ("forward", "dispatch"):
            continue
        for entry in calls:
            if carries_rows(entry, hidden):
                break
            if entry.op.startswith("all_reduce") and entry.reduce == "MAX" and "int" in entry.dtype:
                yield phase, entry
