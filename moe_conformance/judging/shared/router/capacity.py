"""Judges of routers with a capacity: how many slots an expert keeps, and which ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, judge
from moe_conformance.judging.findings import Finding, fail, some
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.router.drop_weights import judge_drop_gradients
from moe_conformance.judging.shared.router.token_drops import Drops, by_design, drops_of, weights_at
from moe_conformance.judging.verdict import NotOffered, Tally, WrongCount, WrongSelection, WrongWeight
from moe_conformance.reference.capacity import drops as capacity_drops
from moe_conformance.reference.capacity.drops import Policy

# ---- how many ------------------------------------------------------------------------------------------------


@judge(WrongCount, "route")
def judge_capacity(reading: Reading) -> Comparisons:
    """Decide whether every expert keeps as many slots as the capacity of the rank allows.

    Counts the experts that were selected by more slots than their capacity; if there are none, all experts.

    Raises:
        WrongForm, WrongSelection: there is nothing to count, see `drops_of`.
        WrongCount: an expert keeps more or fewer.
    """
    drops = drops_of(reading)
    for place in drops.places:
        for fault in _wrong_counts(drops, place):
            yield Comparison(None, fault)
        crowded = sum(n > drops.capacities(place)[0] for n in drops.loads(place))
        yield Comparison(place[1], pairs=crowded or drops.workload.config.experts)
    yield Note(lambda: by_design(drops, lambda other, place: not _wrong_counts(other, place)))


def judge_minimum(reading: Reading, tally: Tally) -> None:
    """Decide whether the capacity is the configured minimum wherever the formula gives less.

    Counts the experts of ranks whose capacity the minimum decides.

    Raises:
        WrongForm, WrongSelection, WrongCount: as `judge_capacity`.
    """
    with tally.uncounted() as uncounted:
        judge_capacity(reading, uncounted)
    drops = drops_of(reading)
    for place in drops.places:
        if drops.capacities(place) == (drops.workload.config.capacity.minimum,):
            tally.add(pairs=drops.workload.config.experts, rank=place[1])


def _wrong_counts(drops: Drops, place: Place) -> list[list[Finding]]:
    """Return for each wrong number of kept slots at a place the findings that may explain it."""
    loads, kept, legal = drops.loads(place), drops.kept_loads(place), drops.capacities(place)
    if any(kept == drops.fits(place, C) for C in legal):
        return []
    where, rank, config = _where(place), place[1], drops.workload.config
    T = len(drops.ids[place])
    round_ = "ceil" if drops.rule.capacity_rounding == "up" else "floor"
    at_least = f", at least {config.capacity.minimum}" if config.capacity.minimum else ""
    right = (
        f"{' or '.join(map(str, legal))} "
        f"({round_}({config.capacity.factor:g} x {config.top_k} x {T} / {config.experts})"
        f"{at_least})"
    )
    full = max((k for k, n in zip(kept, loads, strict=True) if k < n), default=max(loads, default=0))
    if kept == [min(n, full) for n in loads]:
        nobody_dropped = full == max(loads, default=0)
        bound = "at least " if nobody_dropped else ""
        sentence = f"{where} has the capacity {bound}{full} instead of {right}"
        causes = [words for words, C in _other_capacities(drops, place) if C == full or (nobody_dropped and C > full)]
        size = abs(full - legal[0])
        found = [Finding(words, f"{sentence}; likely cause: {words}", (rank,), size) for words in causes]
        return [[*found, Finding("capacity", sentence, (rank,), size)]]
    wrong = [e for e in range(len(loads)) if kept[e] not in {min(loads[e], C) for C in legal}] or [kept.index(full)]
    words = [f"{where} expert {e} keeps {kept[e]} of {loads[e]} slots; expected capacity: {right}" for e in wrong]
    return [[Finding("count", sentence, (rank,))] for sentence in words]


def _other_capacities(drops: Drops, place: Place) -> Iterator[tuple[str, int]]:
    """Yield wrong capacities, each in words."""
    config, layout = drops.workload.config, drops.workload.layout
    assert config.capacity.factor is not None
    m, rank = place
    tokens = [len(drops.ids[m, other]) for other in range(layout.world)]
    per_token = config.capacity.factor / config.experts
    mean = per_token * config.top_k * tokens[rank]
    down, least = drops.rule.capacity_rounding == "up", config.capacity.minimum
    yield f"the capacity was rounded {'down' if down else 'up'}", max(least, int(mean) if down else -int(-mean // 1))
    yield "the last slot within the capacity was dropped (off by one)", drops.capacities(place)[0] - 1
    if config.capacity.minimum:
        yield "computed without the minimum capacity", -int(-mean // 1)
    yield "computed for top-k = 1", max(config.capacity.minimum, -int(-per_token * tokens[rank] // 1))
    for words, T in (
        ("computed from the tokens of all ranks", sum(tokens)),
        ("computed from the largest number of tokens of a rank", max(tokens)),
        ("computed from the smallest number of tokens of a rank", min(tokens)),
        ("computed from the mean number of tokens of the ranks", sum(tokens) // len(tokens)),
    ):
        yield words, drops.capacities_of(T)[0]


def judge_fit(reading: Reading, tally: Tally) -> None:
    """Decide whether an expert keeps as many of its slots as its capacity allows, and none that it was not selected by.

    Raises:
        WrongForm, WrongSelection, WrongCount: an expert keeps other slots.
    """
    with tally.uncounted() as uncounted:
        judge_capacity(reading, uncounted)
    _judge_kept(reading, tally, "any")


@judge(WrongCount, "route")
def judge_filled_load(reading: Reading) -> Comparisons:
    """Decide whether the load that a router reports does not include the rows that fill up experts.

    The load of an expert is the number of slots of the rank's tokens that selected it, or the number of kept ones.

    Raises:
        NotOffered: the router reports no load on any rank.
        WrongForm, WrongSelection: there is nothing to count, see `drops_of`.
        WrongCount: another number, or not one per expert; or no load from a rank while others report theirs.
    """
    drops = drops_of(reading)
    reported = {place: reading.seen(*place).router.counts_E for place in drops.places}
    if all(counts_E is None for counts_E in reported.values()):
        raise NotOffered("the router reports no load")
    for place, counts_E in reported.items():
        found = None if counts_E is None else counts_E.tolist()
        chosen, kept = drops.loads(place), drops.kept_loads(place)
        says = "no load" if found is None else f"the load {found}"
        expected = f"expected {chosen} (selected by its tokens) or {kept} (kept of these)"
        wrong = Finding("load", f"{_where(place)} reports {says}; {expected}", (place[1],))
        yield Comparison(place[1], wrong if found not in (chosen, kept) else "", elements=len(chosen))


# ---- which ---------------------------------------------------------------------------------------------------


def judge_policy(reading: Reading, tally: Tally) -> None:
    """Decide whether the kept slots are those that the configured policy prefers.

    Slots that tie may be kept in any order, as may weights that differ by less than their rounding errors.

    Raises:
        WrongForm, WrongSelection, WrongCount: other slots are kept.
    """
    _judge_kept(reading, tally)


@judge(WrongSelection, "route")
def _judge_kept(reading: Reading, policy: Policy | None = None) -> Comparisons:
    """Judge every place by the oracle; counts the slots of experts that dropped some, else all slots."""
    drops = drops_of(reading)
    for place in drops.places:
        loads, (room, *_) = drops.loads(place), drops.capacities(place)
        if _legal(drops, place, policy):
            yield Comparison(place[1], pairs=sum(n for n in loads if n > room) or sum(loads))
            continue
        overtaken = [[finding] for finding in _overtaken(drops, place, policy)]
        for fault in overtaken or _wrong_counts(drops, place) or [[_unlawful(drops, place, policy)]]:
            yield Comparison(None, fault)
    yield Note(lambda: _by_another_rule(drops, policy))


def _unlawful(drops: Drops, place: Place, policy: Policy | None) -> Finding:
    """Tell what is kept where neither a slot nor a number of slots is known to be wrong."""
    by = policy or drops.rule.policy(drops.workload.config)
    kept = f"keeps {drops.kept_loads(place)} of the {drops.loads(place)} slots that selected each expert"
    capacities = " or ".join(map(str, drops.capacities(place)))
    right = f"those that a capacity of {capacities} keeps by the policy {by!r}"
    return Finding("unlawful", f"{_where(place)} {kept}; expected: {right}", (place[1],))


def _where(place: Place) -> str:
    """Return the rank and, except for the first, the microbatch in words."""
    return f"rank {place[1]} of microbatch {place[0]}" if place[0] else f"rank {place[1]}"


def _by_another_rule(drops: Drops, policy: Policy | None) -> str:
    """Return a note if everything agrees with another claim, or a policy that is not configured, else ""."""
    if note := by_design(drops, lambda other, place: _legal(other, place, policy)):
        return note
    configured, others = policy or drops.rule.policy(drops.workload.config), dict[Policy, str]()
    others |= {"weight": "weights", "position": "position", "choice": "position, first choices first"}
    for other, words in others.items():
        if configured not in (other, "any") and all(_legal(drops, place, other) for place in drops.places):
            return f"; likely cause: slots are kept as by {words}"
    return ""


def _legal(drops: Drops, place: Place, policy: Policy | None) -> bool:
    """Return whether the kept slots are legal under a policy, by default that of the config and the claims."""
    config, (weights_TK, errors_TK) = drops.workload.config, drops.ranking(place)
    assert config.capacity.factor is not None
    (legal,) = capacity_drops.legal_drops_by_rank(
        [drops.kept[place]],
        [drops.ids[place]],
        config.experts,
        factor=config.capacity.factor,
        policy=policy or drops.rule.policy(config),
        rounding=drops.rule.capacity_rounding,
        minimum=config.capacity.minimum,
        weights_by_rank=[weights_TK],
        errors_by_rank=[errors_TK],
    )
    return legal


def _overtaken(drops: Drops, place: Place, policy: Policy | None) -> list[Finding]:
    """Return for every expert a finding with the dropped slot that most clearly precedes a kept one."""
    ids_TK, kept_TK, (weights_TK, errors_TK) = drops.ids[place], drops.kept[place], drops.ranking(place)
    policy, ranked = policy or drops.rule.policy(drops.workload.config), drops.rule.drop_by.removesuffix("s")
    findings = []
    for e in range(drops.workload.config.experts):
        slots: list[tuple[int, int]] = [(t, k) for t, k in (ids_TK == e).nonzero().tolist()]
        kept = [slot for slot in slots if kept_TK[slot]]
        dropped = [slot for slot in slots if not kept_TK[slot]]
        if not kept or not dropped or policy == "any":
            continue
        if policy in ("position", "choice"):
            first = "tokens" if policy == "position" else "choices"
            out, stays = (choose(slots, key=_turn(policy)) for choose, slots in ((min, dropped), (max, kept)))
            wrong, note = (
                _turn(policy)(out) < _turn(policy)(stays),
                f"; expected: by position, the first {first} are kept",
            )
        else:
            out = max(dropped, key=lambda slot: float(weights_TK[slot]))
            stays = min(kept, key=lambda slot: float(weights_TK[slot]))
            apart = float(weights_TK[out] - weights_TK[stays])
            wrong = apart > float(errors_TK[out] + errors_TK[stays])
            note = f"; the dropped token has the {ranked} {weights_TK[out]:.4g}, the kept one {weights_TK[stays]:.4g}"
        if wrong:
            sentence = f"{_where(place)} expert {e} keeps token {stays[0]} and drops token {out[0]}{note}"
            findings.append(Finding("overtaken", sentence, (place[1],)))
    return findings


def _turn(policy: Policy) -> Callable[[tuple[int, int]], tuple[int, ...]]:
    """Return the sort key of slots (t, k) under a policy by position."""
    return (lambda slot: slot[::-1]) if policy == "choice" else (lambda slot: slot)


def judge_lossless(reading: Reading, tally: Tally) -> None:
    """Decide whether a capacity of at least the largest load changes no bit of ids and weights.

    Counts the slots of ranks with such a capacity. Gradients are judged too.

    Raises:
        WrongForm, WrongSelection, WrongCount: a slot is dropped.
        WrongWeight: a weight has other bits.
        AbsentGradient, WrongGradient: as `judge_drop_gradients`.
    """
    drops = drops_of(reading)
    findings, compared = [], []
    for place in drops.places:
        if drops.fits(place, drops.capacities(place)[0]) != drops.loads(place):
            continue
        lost = (~drops.kept[place]).nonzero().tolist()
        if lost:
            words = some(f"token {t} for expert {int(drops.ids[place][t, k])}" for t, k in lost)
            sentence = f"rank {place[1]} drops {words}, although no expert exceeds the capacity"
            findings.append(Finding("dropped", sentence, (place[1],), len(lost)))
        seen = reading.seen(*place)
        assert seen.router.undropped_ids_TK is not None
        assert seen.router.undropped_weights_TK is not None
        order_TK = (drops.ids[place].unsqueeze(2) == seen.router.undropped_ids_TK.unsqueeze(1)).int().argmax(2)
        without_TK = seen.router.undropped_weights_TK.gather(1, order_TK)
        with_TK = weights_at(reading, place, drops.ids[place])
        for t, k in (drops.kept[place] & (with_TK != without_TK)).nonzero().tolist():
            pair = (
                f"{float(with_TK[t, k])!r} with the capacity and {float(without_TK[t, k])!r} without; expected the same"
            )
            sentence = f"rank {place[1]} token {t} has for expert {int(drops.ids[place][t, k])} the weight {pair}"
            findings.append(Finding("weight", sentence, (place[1],)))
        compared.append((place[1], drops.ids[place].numel()))
    if findings:
        dropped = any(finding.kind == "dropped" for finding in findings)
        fail(WrongSelection if dropped else WrongWeight, "route", findings)
    with tally.uncounted() as uncounted:
        judge_drop_gradients(reading, uncounted)
    for rank, slots in compared:
        tally.add(pairs=slots, rank=rank)


@judge(WrongSelection, "route")
def judge_independent_drops(reading: Reading) -> Comparisons:
    """Decide whether the number of slots that a rank keeps depends on its own tokens only, not on other ranks'.

    Counts the slots of tokens that a rank has in two microbatches in which other ranks have different tokens. Which
    slots the configured policy prefers is not judged here (DROP-05, DROP-06).

    Raises:
        WrongForm, WrongSelection, WrongCount: another number is kept.
    """
    judge_fit(reading, Tally())
    drops = drops_of(reading)
    for first, second in _repeated(drops):
        moved = (drops.kept[first] != drops.kept[second]).nonzero().tolist()
        words = some(f"token {t} for expert {int(drops.ids[first][t, k])}" for t, k in moved)
        equal = f"rank {first[1]} has equal tokens in microbatches {first[0]} and {second[0]}"
        wrong = Finding("moved", f"{equal}, but drops or keeps {words} in one of them only", (first[1],))
        yield Comparison(first[1], wrong if moved else "", pairs=drops.ids[first].numel())


def _repeated(drops: Drops) -> Iterator[tuple[Place, Place]]:
    """Yield pairs of places with the same rank and tokens, in which some other rank has different tokens."""
    batches = drops.workload.batches
    for m in range(1, len(batches)):
        same = [torch.equal(one.x_TD, other.x_TD) for one, other in zip(batches[0], batches[m], strict=True)]
        for rank, is_same in enumerate(same):
            if is_same and not all(same):
                yield (0, rank), (m, rank)
