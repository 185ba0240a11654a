"""Native's rows, sums, packs and paddings against the goldens; see `test_native.py`."""

from __future__ import annotations

from typing import ClassVar, cast

import pytest
import torch

from moe_conformance.backends.native.exchange.token_padding import BoundBroken, TokenPadding
from moe_conformance.backends.native.row_ops.combine_add import CombineAdd
from moe_conformance.backends.native.row_ops.packed_sequences import Packing
from moe_conformance.backends.native.row_ops.permutation import sort_pairs
from moe_conformance.backends.native.row_ops.reordering import Reordering
from moe_conformance.backends.native.row_ops.row_index import RowIndex
from moe_conformance.backends.native.row_ops.scatter import ScatterAdd
from moe_conformance.backends.native.row_ops.surface import Permutation
from moe_conformance.contract import Config, Routing, Topology
from moe_conformance.goldens.chapters import permute as permute_chapter
from moe_conformance.goldens.chapters import thd as thd_chapter
from moe_conformance.goldens.chapters import token_padding as padding_chapter
from moe_conformance.goldens.chapters.exchange import _CASES as PLACEMENTS
from self_tests.goldens.golden_native import AlmostAlone, assert_near, case_of, of

CPU = torch.device("cpu")


class TestExchange:
    values: ClassVar = of("exchange")

    @pytest.mark.parametrize("case", PLACEMENTS)
    def test_pairs(self, case: str) -> None:
        """Native sorts the very pairs that are stored as delivered, once for each owner."""
        exchange_groups, held = PLACEMENTS[case]
        everything, found = case_of(self.values, case, "in"), []
        for group in exchange_groups:
            for source in group:
                pairs = sort_pairs(everything[f"ids_TK-{source}"], 6)
                experts = torch.arange(6).repeat_interleave(pairs.counts_E).tolist()
                for token, slot, expert in zip(pairs.token_P.tolist(), pairs.slot_P.tolist(), experts, strict=True):
                    found += [[source, token, slot, expert, rank] for rank in group if expert in held[rank]]
        assert sorted(found) == sorted(case_of(self.values, case, "out")["deliveries"].tolist())


class TestPermute:
    values: ClassVar = of("permute")

    @pytest.mark.parametrize("case", permute_chapter.COUNTS)
    def test_received_rows_are_reordered(self, case: str) -> None:
        """To experts and back to sources, gradients the other way."""
        own, stored = case_of(self.values, case, "in"), case_of(self.values, case, "out")
        moves = Reordering(Config())
        for name, way in (("to-expert", moves.to_expert_major), ("to-source", moves.to_source_major)):
            rows_RD = own["rows_RD"].clone().requires_grad_()
            moved_RD = way(rows_RD, own["counts_WN"])
            (drows_RD,) = torch.autograd.grad(moved_RD, rows_RD, own["upstream_RD"])
            assert torch.equal(moved_RD, stored[f"{name}.rows_RD"])
            assert torch.equal(drows_RD, stored[f"{name}.drows_RD"])

    @pytest.mark.parametrize("case", ["index", "index-of-none", "no-index"])
    def test_rows_by_index(self, case: str) -> None:
        """Sentinels give zeros and add nothing, forward and backward."""
        own, stored = case_of(self.values, case, "in"), case_of(self.values, case, "out")
        leaves = {name: own[name].clone().requires_grad_() for name in ("x_TD", "out_RD", "weights_R")}
        rows = RowIndex(Config())
        rows_RD = rows.gather(leaves["x_TD"], own["index_R"])
        y_TD = rows.scatter(leaves["out_RD"], own["index_R"], leaves["weights_R"], len(own["x_TD"]))
        (dx_TD,) = torch.autograd.grad(rows_RD, leaves["x_TD"], own["drows_RD"])
        dout_RD, dweights_R = torch.autograd.grad(y_TD, [leaves["out_RD"], leaves["weights_R"]], own["dy_TD"])
        found = {"rows_RD": rows_RD, "y_TD": y_TD, "dx_TD": dx_TD, "dout_RD": dout_RD, "dweights_R": dweights_R}
        for name, value in found.items():
            assert_near(value, stored[name])

    @pytest.mark.parametrize("multiple", [1, 4])
    def test_rows_of_experts(self, multiple: int) -> None:
        """By expert, then token, then slot, each segment padded: the stored rows of one rank with all experts."""
        ids_TK = case_of(self.values, "one-rank", "in")["ids_TK-0"]
        T, K = ids_TK.shape
        stored_R4 = case_of(self.values, "one-rank", "out")[f"rows-of-{multiple}_R4"]
        x_TD = torch.arange(1, T + 1)[:, None].double()
        slots_TK = torch.arange(1, K + 1).expand(T, K).double()
        permutation = Permutation(Config().changed({"padding.row_multiple": multiple}))
        made = permutation.permute(x_TD, Routing(ids_TK, slots_TK, permute_chapter.E))
        assert torch.equal(made.rows_RD[:, 0] - 1, stored_R4[:, 2].double())  # -1: padding
        assert made.weights_R is not None
        assert torch.equal(made.weights_R - 1, stored_R4[:, 3].double())
        assert made.counts_E is not None
        assert torch.equal(torch.bincount(stored_R4[:, 0], minlength=permute_chapter.E), made.counts_E)


class TestScatter:
    values: ClassVar = of("scatter")

    @pytest.mark.parametrize("surface", [ScatterAdd, CombineAdd])
    @pytest.mark.parametrize("case", ["repeats", "nothing-added", "no-rows"])
    def test_sums_and_gradients(self, case: str, surface: type[ScatterAdd | CombineAdd]) -> None:
        """Of rows that repeat, of none, and of none to add to."""
        own, stored = case_of(self.values, case, "in"), case_of(self.values, case, "out")
        leaves = [own[name].clone().requires_grad_() for name in ("out_ND", "src_JD")]
        built = surface(Config())
        kept = (torch.zeros_like(own["out_ND"]),) if isinstance(built, CombineAdd) else ()
        y_ND = built.add(leaves[0], own["index_J"], leaves[1], *kept)
        assert_near(y_ND, stored["y_ND"])
        back = torch.autograd.grad(y_ND, leaves, own["upstream_ND"])
        for name, value in zip(("dout_ND", "dsrc_JD"), back, strict=True):
            assert_near(value, stored[name])


class TestPackedSequences:
    values: ClassVar = of("thd")
    packing: ClassVar = Packing(Config())

    def test_lengths(self) -> None:
        """What sequences are padded to, and their sums."""
        stored = case_of(self.values, "lengths", "out")["multiples"].tolist()
        assert stored == [self.packing._multiple(cp, tp, parallel) for tp, cp, parallel in thd_chapter.SIZES]
        for i, lengths in enumerate(thd_chapter.LENGTHS):
            own = case_of(self.values, f"lengths-{i}", "out")
            for m, cp in enumerate((1, 2, 3)):  # multiples 1, 4 and 6
                laid = self.packing.lay_out(lengths, cp, 1, False)
                assert own["cumulative_S"].tolist() == laid.cu_seqlens.tolist()
                assert own["padded_MS"][m].tolist() == laid.cu_seqlens_padded.diff().tolist()

    @pytest.mark.parametrize("case", thd_chapter.PACKS)
    def test_rows_of_tokens(self, case: str) -> None:
        """Which rows of the sequences are tokens; rows behind the last one belong to none."""
        lengths, padded, more = thd_chapter.PACKS[case]
        sums = (self.packing._sums(torch.tensor(each)) for each in (lengths, padded))
        stored_P = case_of(self.values, case, "out")["real_P"].bool()
        assert [*self.packing.tokens(*sums).tolist(), *[False] * more] == stored_P.tolist()

    @pytest.mark.parametrize("cp", thd_chapter.CONTEXTS)
    def test_rows_of_context_ranks(self, cp: int) -> None:
        """Chunk c and its mirror image of every sequence, also where there is no row."""
        stored = case_of(self.values, "context", "out")
        for name, sums in (("rows", thd_chapter.CUMULATIVE_PADDED), ("none", (0, 0))):
            rows = [self.packing.share(torch.tensor(sums, dtype=torch.int32), cp, rank) for rank in range(cp)]
            assert stored[f"{name}-cp{cp}_CR"].tolist() == [sorted(each.tolist()) for each in rows]


class Told(TokenPadding):
    """Token padding that is told the largest number of its group."""

    largest: int

    def _largest(self, tokens: int) -> int:
        return self.largest


class TestTokenPadding:
    values: ClassVar = of("token_padding")

    def padding(self, alignment: int, bound: int | None = None) -> Told:
        """Build it on a rank without others."""
        asked = {"padding.tokens": "no" if bound is None else "bound", "padding.bound": bound}
        return Told(Config().changed({**asked, "padding.alignment": alignment}), cast("Topology", AlmostAlone()), CPU)

    def test_counts(self) -> None:
        """Rounded up to the alignment, whether a bound gives them or the largest of the group."""
        counts, stored = (
            case_of(self.values, "counts", "in")["counts_N"].tolist(),
            case_of(self.values, "counts", "out"),
        )
        for a, alignment in enumerate(padding_chapter.ALIGNMENTS):
            bounded = [self.padding(alignment, bound).count(0) for bound in counts]
            assert stored["bounded_AN"][a].tolist() == bounded
            assert stored["aligned_AN"][a].tolist() == [self.padding(alignment)._aligned(n) for n in counts]

    @pytest.mark.parametrize("case", padding_chapter.GROUPS)
    def test_groups(self, case: str) -> None:
        """All ranks of a group pad to its largest number; one beyond the bound raises, which is a legal refusal."""
        tokens, stored = case_of(self.values, case, "in")["tokens_W"].tolist(), case_of(self.values, case, "out")
        for group in padding_chapter.GROUPS[case]:
            for rank in group:
                built = self.padding(padding_chapter.A)
                built.largest = max(tokens[each] for each in group)
                assert int(stored["padded_W"][rank]) == built.count(tokens[rank])
        for b, bound in enumerate(padding_chapter.BOUNDS):
            refused = tuple(self._refuses(bound, T) for T in tokens)
            for number, group in enumerate(padding_chapter.GROUPS[case]):
                everyone = any(refused[rank] for rank in group)  # the others raise with the one that has too many
                answers = tuple(everyone if rank in group else False for rank in range(4))
                assert stored["legal_BRG"][b, padding_chapter.REFUSALS.index(answers), number]

    def _refuses(self, bound: int, tokens: int) -> bool:
        try:
            self.padding(padding_chapter.A, bound).count(tokens)
        except BoundBroken:
            return True
        return False
