"""Native's router losses, load meter and experts without gradients against the goldens; see `test_native.py`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from threading import Barrier
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_conformance.backends.native.exchange.equal_splits import EqualSplits
from moe_conformance.backends.native.meter import NAMES, Meter, Recorded
from moe_conformance.backends.native.router.losses import RouterLosses, Tokens
from moe_conformance.contract import Config, MeteredPass, Topology
from moe_conformance.goldens.chapters import fast_paths as fast_paths_chapter
from moe_conformance.goldens.chapters import losses as losses_chapter
from moe_conformance.goldens.chapters import overload as overload_chapter
from self_tests.goldens.golden_native import assert_near, case_of, of

CPU = torch.device("cpu")


class TestLosses:
    values: ClassVar = of("losses")
    settings: ClassVar = {name: own["score"] for name, own in losses_chapter._CASES.items()}

    def losses_of(self, case: str) -> tuple[RouterLosses, Tokens]:
        """Return native's losses with the chapter's coefficient, and the tokens of a case; no group is asked for."""
        own = case_of(self.values, case, "in")
        logits_TE, E, K = own["logits_TE"], losses_chapter._E, losses_chapter._K
        config = Config(experts=E, top_k=K, dtype=torch.float64).changed(
            {"routing.score": self.settings[case], "losses.z": losses_chapter._C, "losses.auxiliary": losses_chapter._C}
        )
        valid_T = ~own["padding_T"].bool() if "padding_T" in own else torch.ones(len(logits_TE), dtype=torch.bool)
        losses = RouterLosses(config, cast(Topology, None))
        return losses, Tokens(logits_TE, valid_T, own["sequences_T"], 1, own["ids_TK"])

    @pytest.mark.parametrize("case", losses_chapter._CASES)
    def test_scores(self, case: str) -> None:
        """The scores of all experts, divided by their sum, whatever the score, its size or its mask."""
        losses, tokens = self.losses_of(case)
        assert_near(losses.scores(tokens.logits_TE), case_of(self.values, case, "out")["p_TE"])

    @pytest.mark.parametrize("case", ["softmax", "masked-expert", "padding-only", "no-tokens"])
    def test_choices(self, case: str) -> None:
        """The experts of highest score of valid tokens, as sets; native opens no groups for it, and ties are free."""
        losses, tokens = self.losses_of(case)
        stored_TK = case_of(self.values, case, "out")["choices_TK"][tokens.valid_T]
        assert torch.equal(losses.choices(tokens)[tokens.valid_T].sort(1).values, stored_TK.sort(1).values)

    @pytest.mark.parametrize("case", losses_chapter._CASES)
    def test_z_loss(self, case: str) -> None:
        """Its value and its gradient, over the valid tokens."""
        losses, tokens = self.losses_of(case)
        stored = case_of(self.values, case, "out")
        leaf_TE = tokens.logits_TE.clone().requires_grad_()
        value = losses.z(leaf_TE, tokens.valid_T, tokens.valid_T.sum())
        assert_near(value, stored["z"])
        assert_near(torch.autograd.grad(value, leaf_TE)[0], stored["dz_TE"])

    @pytest.mark.parametrize("case", [case for case in losses_chapter._CASES if case != "underflowed"])
    def test_auxiliary_loss(self, case: str) -> None:
        """Its value and its gradient, given how many routed slots each expert has; some slots are empty."""
        losses, tokens = self.losses_of(case)
        stored = case_of(self.values, case, "out")
        leaf_TE = tokens.logits_TE.clone().requires_grad_()
        valid = tokens.valid_T.sum()
        f_E = losses.fractions(stored["counts_E"].double(), valid, losses_chapter._K)
        value = losses.balance("auxiliary", f_E, losses.scores(leaf_TE), tokens.valid_T, valid)
        assert_near(value, stored["auxiliary"])
        assert_near(torch.autograd.grad(value, leaf_TE)[0], stored["dauxiliary_TE"])


# Of the golden's entries: stages, the last without any; ranks of an exchange group; layers, in every stage the same
# numbers, which native counts through all stages.
STAGES, GROUP, LAYERS = 3, 2, 4


@dataclass(frozen=True)
class Stage:
    """The topology of one of six ranks: three stages of an exchange group of two."""

    rank: int
    sizes: dict[str, int] = field(default_factory=lambda: {"world": STAGES * GROUP, "ep": GROUP, "etp": 1})

    def ranks(self, name: str) -> tuple[int, ...]:
        """Name the ranks of a group."""
        first = self.rank - self.rank % GROUP
        group = (first, first + 1)
        return {"world": tuple(range(STAGES * GROUP)), "ep_etp": group, "ep": group, "edp": (self.rank,)}[name]


class Together:
    """What the threads of all ranks bring to a reduction."""

    def __init__(self) -> None:
        self.given: dict[int, list[float]] = {}
        self.barriers: dict[tuple[int, ...], Barrier] = {}
        for rank in range(STAGES * GROUP):
            for name in ("world", "ep_etp"):
                ranks = Stage(rank).ranks(name)
                self.barriers.setdefault(ranks, Barrier(len(ranks), timeout=60))


class ThreadedMeter(Meter):
    """Native's meter, whose collectives are of threads."""

    together: Together

    def _reduced(self, values: Sequence[float], group: str, how: Any) -> Tensor:
        ranks = self.topology.ranks(group)
        if len(ranks) == 1:
            return torch.tensor(values, dtype=torch.float64)
        self.together.given[self.topology.rank] = list(values)
        self.together.barriers[ranks].wait()
        brought = torch.tensor([self.together.given[rank] for rank in ranks], dtype=torch.float64)
        self.together.barriers[ranks].wait()  # all have read before anyone brings the next
        return brought.sum(0) if how is dist.ReduceOp.SUM else brought.amax(0) if brought.numel() else brought[0]


class TestOverload:
    values: ClassVar = of("overload")

    def reports(self) -> list[dict[str, float]]:
        """Return what native reports on every rank of the golden's entries that have a layer."""
        own = {name: value.tolist() for name, value in case_of(self.values, "entries", "in").items()}
        entries = list(zip(own["stage_N"], own["layer_N"], own["pairs_NW"], own["tokens_N"], strict=True))
        together, meters = Together(), []
        for rank in range(STAGES * GROUP):
            meter = ThreadedMeter(cast(Topology, Stage(rank)), Config(experts=GROUP, top_k=2), CPU)
            meter.together = together
            for stage, layer, pairs, tokens in entries:
                if stage == rank // GROUP:
                    # The group brought that many tokens: the first rank all of them, for one expert on each rank.
                    share = 1 if rank % GROUP == 0 else 0
                    number = None if layer < 0 else layer + LAYERS * stage
                    meter.entries.append(Recorded(number, share * torch.tensor(pairs), share * tokens))
            meters.append(meter)
        with ThreadPoolExecutor(len(meters)) as pool:
            return list(pool.map(lambda meter: meter.report(), meters))

    @pytest.mark.parametrize("stage", range(STAGES))
    def test_reports(self, stage: int) -> None:
        """Average and maximum of all entries and of every layer; what may be absent is not asked for."""
        stored = case_of(self.values, f"reported-{stage}-zero-without", "out")["rows_N5"].tolist()
        for report in self.reports()[stage * GROUP : (stage + 1) * GROUP]:
            for layer, kind, above, below, absent in stored:
                if absent or kind == 2:  # of timelines, which the entries do not have
                    continue
                name = f"moe/{NAMES[kind]}" + (f"_layer_{layer + LAYERS * stage}" if layer >= 0 else "")
                assert pytest.approx(float(Fraction(above, below)), rel=1e-12) == report[name], name

    def passes(self, case: str, ranks: int) -> list[MeteredPass]:
        """Return a forward of every rank, with empty slots where a golden has padding."""
        own, found = case_of(self.values, case, "in"), []
        for rank in range(ranks):
            ids_TK = own[f"ids_TK-{rank}"].clone()
            padding_T = own.get(f"padding_T-{rank}", torch.zeros(len(ids_TK))).bool()
            ids_TK[padding_T] = -1
            found.append(MeteredPass("forward", 0, 0, ids_TK, padding_T, torch.zeros(len(ids_TK), 1)))
        return found

    @pytest.mark.parametrize(("case", "ep", "etp"), [("ep2", 2, 1), ("ep2-etp2", 2, 2), ("no-tokens", 2, 1)])
    def test_entries(self, case: str, ep: int, etp: int) -> None:
        """Pairs of every rank, the balanced count and the factor of an entry."""
        stored = case_of(self.values, case, "out")
        topology = cast(Topology, Stage(0, {"world": ep * etp, "ep": ep, "etp": etp}))
        meter = Meter(topology, Config(experts=overload_chapter._E, top_k=overload_chapter._K), CPU)
        passes = self.passes(case, ep * etp)
        counts_E = torch.stack([meter._counts(each.ids_TK) for each in passes if each.ids_TK is not None]).sum(0)
        pairs_C = counts_E.reshape(ep, -1).sum(1)
        balanced_1 = meter._balanced(torch.tensor([sum(meter._tokens(each) for each in passes)]).double())
        assert stored["pairs_W"].tolist() == pairs_C.repeat_interleave(etp).tolist()
        assert float(Fraction(*stored["balanced"].tolist())) == balanced_1.item()
        factor = float(Fraction(*stored["factor"].tolist()))
        assert pytest.approx(factor, rel=1e-12) == meter._factors(pairs_C[None].double(), balanced_1).item()

    def test_counters(self) -> None:
        """Pairs of every expert and the trace of training forwards, each of them once."""
        own, stored = (case_of(self.values, "counters", side) for side in ("in", "out"))
        meter = Meter(cast(Topology, Stage(0)), Config(experts=5, top_k=own["ids_PTK"].shape[2]), CPU)
        for place in (0, 3, 5):  # a forward, one alone, and another one
            padding_T = own["padding_PT"][place].bool() if place else torch.zeros(own["ids_PTK"].shape[1]).bool()
            ids_TK = own["ids_PTK"][place].masked_fill(padding_T[:, None], -1)
            meter.arrived(MeteredPass("forward", 0, place, ids_TK, padding_T), flows=True)
            record_TE = torch.zeros(len(ids_TK), 6).scatter(1, torch.where(ids_TK < 0, 5, ids_TK), 1.0)[:, :5]
            real_T = ~padding_T
            assert torch.equal(stored[f"record_TE-{place}"][real_T].bool(), record_TE[real_T].bool())
            assert torch.equal(ids_TK, meter.trace[0, place])
        assert stored["counts_E"].tolist() == meter.counted().tolist()


class TestFastPaths:
    values: ClassVar = of("fast_paths")

    @pytest.mark.parametrize("case", [case for case in fast_paths_chapter.PIECES if case != "no-piece"])
    def test_pieces(self, case: str) -> None:
        """Padded and cut back, with their gradients, whatever stands in the padding."""
        pieces, size = fast_paths_chapter.PIECES[case]
        own, stored = case_of(self.values, case, "in"), case_of(self.values, case, "out")
        splits = EqualSplits(cast(dist.ProcessGroup, None), CPU)
        rows_RD, rows_PD = own["rows_RD"].clone().requires_grad_(), own["rows_PD"].clone().requires_grad_()
        padded_PD, compacted_RD = splits.pad(rows_RD, pieces, size), splits.compact(rows_PD, pieces, size)
        assert torch.equal(padded_PD, stored["padded_PD"])
        assert torch.equal(compacted_RD, stored["compacted_RD"])
        assert torch.equal(torch.autograd.grad(padded_PD, rows_RD, own["upstream_PD"])[0], stored["drows_RD"])
        assert torch.equal(torch.autograd.grad(compacted_RD, rows_PD, own["upstream_RD"])[0], stored["drows_PD"])
