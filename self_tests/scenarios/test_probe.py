"""The probe expert answers exactly, in its own columns, and records what passed."""

from __future__ import annotations

import pytest
import torch

from moe_conformance.contract import Config, Delivery, ExpertFn
from moe_conformance.scenarios.identity import Identity
from moe_conformance.scenarios.probe import Probe
from moe_conformance.workloads.records import tags

CONFIG = Config(experts=4, hidden=34)  # blocks of 8 columns, two columns that are nobody's


def delivery(dtype: torch.dtype = torch.float32, weights: bool = False) -> Delivery:
    """Two rows for expert 1, one for expert 3, one zero row claimed for expert 3, one tail row of garbage."""
    rows = tags.encode(0, 0, 3, 34, dtype)
    rows = torch.cat([rows, torch.zeros(1, 34, dtype=dtype), torch.full((1, 34), torch.nan, dtype=dtype)])
    rows.requires_grad_()
    weights_R = torch.tensor([0.5, 0.25, 0.75, 1.0, 1.0]) if weights else None
    return Delivery.grouped(rows, [2, 2], weights_R)


class TestAnswers:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_an_expert_writes_its_own_block_only(self, dtype: torch.dtype) -> None:
        """Expert e answers gain(e) times its own columns, and zero in all others."""
        given = delivery(dtype)
        out = Probe(CONFIG, (1, 3), 1.0)(given)
        expected = torch.zeros(3, 34, dtype=dtype)
        expected[:2, 8:16] = given.rows_RD[:2, 8:16].detach() * tags.gain(1)
        expected[2, 24:32] = given.rows_RD[2, 24:32].detach() * tags.gain(3)
        assert torch.equal(expected, out[:3].detach())
        assert dtype == out.dtype

    def test_padding_is_answered_with_a_large_finite_value(self) -> None:
        """A zero row and a row for nobody get the answer that must reach no output, never NaN."""
        out = Probe(CONFIG, (1, 3), 1.0)(delivery(weights=True))
        assert torch.equal(torch.full((2, 34), tags.PADDING_ANSWER), out[3:].detach())

    def test_a_token_of_other_ranks_experts_is_answered_with_zero(self) -> None:
        """Where the answers of several ranks are summed, no expert adds nothing; a zero row is padding all the same."""
        rows = torch.cat([tags.encode(0, 0, 2, 34, torch.float32), torch.zeros(1, 34)])
        given = Delivery.listed(rows, torch.tensor([[0, 1], [-1, -1], [0, -1]]), unrouted="zero")
        out = Probe(CONFIG, (1, 3), 1.0)(given)
        assert out[0].any()
        assert torch.equal(torch.zeros(34), out[1])
        assert torch.equal(torch.full((34,), tags.PADDING_ANSWER), out[2])

    @pytest.mark.parametrize("expert", [Probe(CONFIG, (1, 3), 1.0), Identity()], ids=["probe", "identity"])
    def test_a_token_of_other_ranks_experts_that_is_not_finite_adds_nothing(self, expert: ExpertFn) -> None:
        """Neither NaN in its row nor in its upstream gradient reaches an output, or a gradient of rows or weights."""
        rows = tags.encode(0, 0, 2, 34, torch.float32)
        rows[0] = torch.nan
        rows.requires_grad_()
        weights = torch.ones(2, 2, requires_grad=True)
        out = expert(Delivery.listed(rows, torch.full((2, 2), -1), weights, unrouted="zero"))
        out.backward(torch.full((2, 34), torch.nan))
        assert torch.equal(torch.zeros(2, 34), out.detach())
        assert rows.grad is None or torch.equal(torch.zeros(2, 34), rows.grad)
        assert weights.grad is None or torch.equal(torch.zeros(2, 2), weights.grad)

    def test_weights_that_travel_are_applied(self) -> None:
        """A weight handed over with a row multiplies the answer."""
        plain, weighted = (Probe(CONFIG, (1, 3), 1.0)(delivery(weights=w)) for w in (False, True))
        assert torch.equal(plain[:3] * torch.tensor([[0.5], [0.25], [0.75]]), weighted[:3])

    def test_several_ids_in_a_row_add_up_in_their_blocks(self) -> None:
        """A listed row is answered by each of its experts, in disjoint columns."""
        rows = tags.encode(0, 0, 1, 34, torch.float32)
        both = Probe(CONFIG, (1, 3), 1.0)(Delivery.listed(rows, torch.tensor([[0, 1]])))
        alone = [Probe(CONFIG, (1, 3), 1.0)(Delivery.listed(rows, torch.tensor([[n, -1]]))) for n in (0, 1)]
        assert torch.equal(alone[0] + alone[1], both)

    def test_the_parts_of_all_shards_sum_to_the_answer(self) -> None:
        """With etp shards every part differs from the whole, and together they are it."""
        rows = tags.encode(0, 0, 1, 34, torch.float32)
        given = Delivery.listed(rows, torch.tensor([[0]]))
        whole, *parts = (Probe(CONFIG, (1, 3), part)(given) for part in (1.0, tags.part(0, 2), tags.part(1, 2)))
        assert torch.equal(parts[0] + parts[1], whole)
        assert not any(torch.equal(part, whole) for part in parts)

    def test_no_rows_stay_in_the_graph(self) -> None:
        """An empty delivery gives an empty answer that backward goes through."""
        rows = torch.empty(0, 34, requires_grad=True)
        out = Probe(CONFIG, (1, 3), 1.0)(Delivery.grouped(rows, [0, 0]))
        out.sum().backward()
        assert (0, 34) == tuple(out.shape)
        assert rows.grad is not None

    def test_an_expert_without_a_column_is_refused(self) -> None:
        """More experts than columns cannot be told apart."""
        with pytest.raises(ValueError, match="64 experts, hidden 34"):
            Probe(Config(experts=64, hidden=34), (0,), 1.0)

    def test_rows_of_another_width_are_refused(self) -> None:
        """Rows that are not (R, D) are named by their shape."""
        with pytest.raises(ValueError, match=r"\(2, 17\), expected \(R, 34\)"):
            Probe(CONFIG, (1, 3), 1.0)(Delivery.grouped(torch.zeros(2, 17), [1, 1]))


class TestRecords:
    def test_gradients_are_seen_on_both_sides(self) -> None:
        """The gradient that reached the answer and the one that left for the rows are both kept."""
        probe, given = Probe(CONFIG, (1, 3), 1.0), delivery()
        upstream = torch.randn(5, 34, generator=torch.Generator().manual_seed(0))
        probe(given).backward(upstream)
        (handed,) = probe.handed(0)
        assert handed.out_grad_RD is not None
        assert torch.equal(upstream, handed.out_grad_RD)
        assert handed.rows_grad_RD is not None
        assert torch.equal(given.rows_RD.grad, handed.rows_grad_RD)
        assert torch.equal(upstream[0, 8:16] * tags.gain(1), handed.rows_grad_RD[0, 8:16])
        assert not handed.rows_grad_RD[0, 16:].any()

    def test_calls_are_kept_by_microbatch(self) -> None:
        """Each microbatch has its own calls, and rows are copied at the time of the call."""
        probe = Probe(CONFIG, (1, 3), 1.0)
        for microbatch, T in ((0, 2), (1, 3), (0, 1)):
            probe.microbatch = microbatch
            probe(Delivery.grouped(tags.encode(0, microbatch, T, 34, torch.float32), [T, 0]))
        assert [2, 1] == [handed.rows_RD.shape[0] for handed in probe.handed(0)]
        assert [3] == [handed.rows_RD.shape[0] for handed in probe.handed(1)]
