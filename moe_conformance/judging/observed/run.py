"""A reading of an outcome for all judges: delivered rows, decoded and matched with the routing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_conformance.contract import Claims
from moe_conformance.judging.compare.tensors import projection
from moe_conformance.judging.findings import ratio_names
from moe_conformance.judging.observed import probe_expected as expected
from moe_conformance.judging.observed import replicas
from moe_conformance.judging.observed.claims import claims_of, weighed_as_claimed
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.verdict import (
    NotOffered,
    WrongDelivery,
)
from moe_conformance.reference.exchange.deliveries import Pair
from moe_conformance.scenarios.outcome import Handed, Microbatch, Outcome, RankOutcome
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Batch

Applied = Literal["input", "expert", "combine"]


class Entry(NamedTuple):
    """One row delivered for one local expert, with the decoded tag of the row (see `tags.Decoded`)."""

    rank: int  # the rank of the expert
    microbatch: int  # the microbatch that the experts were called for
    call: int
    row: int
    slot: int  # column J of the delivery
    expert: int  # global id
    kind: int  # tags.TAG, PADDING or CORRUPT
    source: int
    of_microbatch: int  # the microbatch in the row's tag
    token: int
    scale: float
    weight: float | None  # delivered with the row

    @property
    def place(self) -> str:
        """The position of the row, as messages write it."""
        call = f" of call {self.call}" if self.call else ""
        return f"row {self.row}{call} delivered to rank {self.rank} for expert {self.expert}"

    @property
    def token_name(self) -> str:
        """The token that the row's tag names, as messages write it."""
        other = f" of microbatch {self.of_microbatch}" if self.of_microbatch != self.microbatch else ""
        return f"rank {self.source} token {self.token}{other}"


class Match(NamedTuple):
    """A routed pair and the entry that delivered it."""

    pair: Pair
    entry: Entry


class Lost(NamedTuple):
    """A routed pair that was not delivered."""

    microbatch: int
    pair: Pair


@dataclass(frozen=True)
class Matching:
    """Expected deliveries matched with the observed ones."""

    matches: tuple[Match, ...]
    lost: tuple[Lost, ...]
    extra: tuple[Entry, ...]  # tagged rows that belong to no routed pair
    corrupt: tuple[Entry, ...]  # rows of no token

    @property
    def wrong_microbatches(self) -> set[int]:
        """The microbatches in which a pair was not delivered, or a row belongs to no routed pair."""
        return {found.microbatch for found in self.lost} | {found.microbatch for found in self.extra}


@dataclass(frozen=True)
class Reading:
    """An outcome in which every rank finished, made by `read`. The properties are computed once."""

    outcome: Outcome
    ranks: tuple[RankOutcome, ...]  # by rank

    @property
    def batches(self) -> Sequence[tuple[Batch, ...]]:
        """The batches of the workload, [microbatch][rank]."""
        return self.outcome.workload.batches

    def seen(self, microbatch: int, rank: int) -> Microbatch:
        """Return what a rank recorded in a microbatch."""
        return self.ranks[rank].microbatches[microbatch]

    def handed(self, entry: Entry) -> Handed:
        """Return the call of the experts that an entry belongs to."""
        return self.seen(entry.microbatch, entry.rank).exchange.handed[entry.call]

    def goes_backward(self, microbatch: int) -> bool:
        """Return whether the schedule has a backward of this microbatch."""
        return self.outcome.workload.goes_backward(microbatch)

    @cached_property
    def claims(self) -> Claims:
        """The claims of the backend; see `claims_of`."""
        return claims_of(self.ranks)

    @cached_property
    def parts(self) -> tuple[float, ...]:
        """The factor of the experts' outputs on every rank: that of its etp shard, 1 where outputs are whole."""
        parts = [1.0] * len(self.ranks)
        for shards in self.outcome.workload.layout.groups()["etp"]:
            for index, rank in enumerate(shards):
                if self.ranks[rank].partial:
                    parts[rank] = tags.part(index, len(shards))
        return tuple(parts)

    @cached_property
    def expected(self) -> expected.Expected:
        """The expected results with probe experts, from the oracles."""
        return expected.expect(self.outcome.workload, self._shards or [1.0])

    @cached_property
    def _shards(self) -> list[float]:
        """The factors of the shards of one etp group; empty where outputs are whole."""
        shards = self.outcome.workload.layout.groups()["etp"][0]
        return [self.parts[rank] for rank in shards if self.ranks[rank].partial]

    @cached_property
    def token_ratios(self) -> dict[str, float]:
        """Factors by which y, or a gradient of tokens or weights, is likely to be wrong, likeliest first."""
        sizes = {**self.outcome.workload.layout.sizes(), "K": self.outcome.workload.config.top_k}
        named: dict[str, float] = {}
        if len(self._shards) > 1:
            named |= {f"etp shard {i} alone": part for i, part in enumerate(self._shards)}
        if len(self._shards) > 2:
            named |= {f"etp shard {i} missing": 1 - part for i, part in enumerate(self._shards)}
        order = ("etp", "ep", "K", "tp", "cp", "dp", "edp", "pp", "world")
        return named | ratio_names({name: sizes[name] for name in order})

    @cached_property
    def expert_ratios(self) -> dict[str, float]:
        """Factors by which a gradient of the experts' parameters is likely to be wrong, likeliest first."""
        sizes = self.outcome.workload.layout.sizes()
        return ratio_names({name: sizes[name] for name in ("ep", "etp", "edp", "dp", "cp", "tp", "pp", "world")})

    @cached_property
    def router_ratios(self) -> dict[str, float]:
        """Factors by which the router's gradient, held by all ranks of a stage, is likely to be wrong."""
        sizes = self.outcome.workload.layout.sizes()
        return ratio_names({name: sizes[name] for name in ("dp", "cp", "tp", "ep", "etp", "edp", "pp", "world")})

    @cached_property
    def applied(self) -> tuple[tuple[Applied, ...], ...]:
        """Where the weights are applied on every rank, [rank][microbatch].

        This is what the exchange claims after the microbatch's forward, else what the session claims. If the config has
        weights "after the expert", they may be applied by the experts or in combine: by the experts if weights other
        than 1 are delivered to them. Experts that take weights receive ones where combine applies the weights.
        """
        chosen: list[tuple[Applied, ...]] = []
        configured = self.outcome.workload.config.weights_applied
        for rank in self.ranks:
            places = [seen.exchange.weights_at or rank.weights_at for seen in rank.microbatches]
            if configured == "input":
                places = ["input"] * len(places)
            elif configured == "output":
                handed = (call.weights_RJ for seen in rank.microbatches for call in seen.exchange.handed)
                carried = any(weights_RJ is not None and bool((weights_RJ != 1).any()) for weights_RJ in handed)
                places = ["expert" if carried else "combine"] * len(places)
            chosen.append(
                tuple("input" if at == "input" else "expert" if at == "expert" else "combine" for at in places)
            )
        return tuple(chosen)

    def applied_to(self, entry: Entry) -> Applied:
        """Return where the weight of a row is applied."""
        return self.applied[entry.rank][entry.microbatch]

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, including padding rows for an expert; rows for no expert are left out."""
        entries: list[Entry] = []
        for rank in self.ranks:
            for seen in rank.microbatches:
                for call, handed in enumerate(seen.exchange.handed):
                    entries += _entries(rank, call, handed)
        return tuple(entries)

    @cached_property
    def pairs(self) -> tuple[tuple[Pair, ...], ...]:
        """The expected deliveries of every microbatch."""
        try:
            return replicas.expected_pairs(self)
        except ValueError as error:
            raise WrongDelivery("dispatch", str(error)) from error

    @cached_property
    def routed(self) -> tuple[replicas.Routed, ...]:
        """The ids and the experts of all ranks as the oracles take them, by microbatch."""
        return replicas.routed(self)

    @cached_property
    def matching(self) -> Matching:
        """The expected deliveries matched with the observed ones."""
        return _match(self)

    def weight(self, microbatch: int, pair: Pair) -> float:
        """Return the routing weight of a pair."""
        return self.weights[microbatch][pair.source][pair.token][pair.slot]

    @cached_property
    def weights(self) -> list[list[list[list[float]]]]:
        """The routing weights as floats, [microbatch][rank][token][slot]."""
        return [[batch.weights_TK.double().tolist() for batch in ranks] for ranks in self.batches]


def read(outcome: Outcome) -> Reading:
    """Return the reading of an outcome, for the judges.

    Raises:
        NotOffered: the tokens of its rows cannot be identified.
        Raised, Hung, Died: a rank did not finish.
        MalformedClaim: a rank reports counts or shapes that contradict each other.
    """
    require_finished(outcome)
    if (weighed := weighed_as_claimed(outcome.workload, claims_of(outcome.ranks))) is not outcome.workload:
        outcome = replace(outcome, workload=weighed)
    reading = Reading(outcome, tuple(sorted(outcome.ranks, key=lambda rank: rank.rank)))
    _require_legible(reading)
    return reading


def _require_legible(reading: Reading) -> None:
    """Raise if weights that rows are multiplied with remove or invert the tags of the rows.

    Raises:
        NotOffered: a routed token's weight is zero or negative, and is applied at the experts' input.
    """
    if reading.outcome.workload.run != ExchangeStep() or not any("input" in of_rank for of_rank in reading.applied):
        return
    batches = [batch for ranks in reading.batches for batch in ranks]
    if any(bool(((batch.ids_TK >= 0) & (batch.weights_TK <= 0)).any()) for batch in batches):
        raise NotOffered("weights <= 0, applied at the experts' input, remove the tags by which rows are recognised")


def _entries(rank: RankOutcome, call: int, handed: Handed) -> list[Entry]:
    decoded = tags.decode(handed.rows_RD)
    columns = [
        field.tolist()
        for field in (decoded.kind_R, decoded.rank_R, decoded.microbatch_R, decoded.token_R, decoded.scale_R)
    ]
    weights_RJ = None if handed.weights_RJ is None else handed.weights_RJ.double().tolist()
    entries = []
    slots = [(row, slot, local) for row, ids_J in enumerate(handed.ids_RJ.tolist()) for slot, local in enumerate(ids_J)]
    for row, slot, local in slots:
        if local < 0:  # an empty slot
            continue
        if local >= len(rank.local_experts):
            of = f"local expert {local}, and holds {len(rank.local_experts)} experts"
            raise WrongDelivery("dispatch", f"rank {rank.rank} received row {row} for {of}", ranks=(rank.rank,))
        kind, source, of_microbatch, token, scale = (column[row] for column in columns)
        weight = None if weights_RJ is None else weights_RJ[row][slot]
        expert = rank.local_experts[local]
        where = (rank.rank, handed.microbatch, call, row, slot, expert)
        entries.append(Entry(*where, kind, source, of_microbatch, token, scale, weight))
    return entries


_Key = tuple[int, int, int, int, int]  # (microbatch, destination, source, token, expert)


def _match(reading: Reading) -> Matching:
    """Match expected pairs with entries of the same rank, token and expert.

    Slots of one token with the same expert are matched by weight, smallest first.
    """
    expected_pairs: dict[_Key, list[Pair]] = defaultdict(list)
    for microbatch, of_microbatch in enumerate(reading.pairs):
        for pair in of_microbatch:
            expected_pairs[microbatch, pair.destination, pair.source, pair.token, pair.expert].append(pair)
    found: dict[_Key, list[Entry]] = defaultdict(list)
    extra: list[Entry] = []
    corrupt: list[Entry] = []
    for entry in reading.entries:
        if entry.kind == tags.CORRUPT:
            corrupt.append(entry)
        elif entry.kind == tags.TAG and entry.of_microbatch == entry.microbatch:
            found[entry.microbatch, entry.rank, entry.source, entry.token, entry.expert].append(entry)
        elif entry.kind == tags.TAG:
            extra.append(entry)

    matches: list[Match] = []
    lost: list[Lost] = []
    for key, pairs in expected_pairs.items():
        entries = found.pop(key, [])
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: reading.weight(key[0], pair))
            entries.sort(key=lambda entry: _carried(reading, entry))
        matches += [Match(pair, entry) for pair, entry in zip(pairs, entries, strict=False)]
        lost += [Lost(key[0], pair) for pair in pairs[len(entries) :]]
        extra += entries[len(pairs) :]
    extra += [entry for entries in found.values() for entry in entries]
    return Matching(tuple(matches), tuple(lost), tuple(extra), tuple(corrupt))


def _carried(reading: Reading, entry: Entry) -> float:
    """Return the weight of an entry: delivered beside the row, as its scale, or from the gradient at its output."""
    applied = reading.applied_to(entry)
    if applied == "expert":
        return entry.weight or 0.0
    if applied == "input":
        return entry.scale
    gradient = reading.handed(entry).out_grad_RD
    if gradient is None:
        return 0.0
    upstream_D = reading.batches[entry.microbatch][entry.source].upstream[entry.token]
    return projection(gradient[entry.row], upstream_D)


def tokens_of(reading: Reading, sequence: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[str]]:
    """Return the tensors of all microbatches and ranks as one, (all T, ...), and the name of every row's token."""
    names: list[str] = []
    for m, ranks in enumerate(sequence):
        of = f" of microbatch {m}" if len(reading.batches) > 1 else ""
        for r, rows in enumerate(ranks):
            names += [f"rank {r} token {t}{of}" for t in range(len(rows))]
    return torch.cat([rows.double() for ranks in sequence for rows in ranks]), names
