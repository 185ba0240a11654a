"""What is drawn for a backend: all that its limits allow, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from moe_conformance.contract import Limit
from moe_conformance.contract.topology import Layout
from moe_conformance.workloads.drawn.distribution import required
from moe_conformance.workloads.drawn.freedom import Freedom
from moe_conformance.workloads.records import tags
from moe_conformance.workloads.records.features import broken
from moe_conformance.workloads.records.runs import ExchangeStep, RouterStep
from self_tests.workloads.drawn_searches import STRATEGIES

LAYOUTS = (Layout(1), Layout(2, ep=2), Layout(4, ep=2, etp=2), Layout(4, tp=2, ep=4))
LIMITS = {
    "none": (),
    "even": (Limit("uneven_tokens", (False,), "-"),),
    "even and not zero": (Limit("uneven_tokens", (False,), "-"), Limit("zero_tokens", (False,), "-")),
    "multiples of 4": (Limit("tokens", range(0, 1 << 20, 4), "-"),),
    "multiples of 16": (Limit("tokens", range(0, 1 << 20, 16), "-"), Limit("zero_tokens", (False,), "-")),
    "kept": (Limit("dropped_slots", (False,), "-"), Limit("duplicate_experts", (False,), "-")),
    "one at a time": (Limit("in_flight", (1,), "-"), Limit("dtype", (torch.bfloat16,), "-")),
}
FEW = settings(max_examples=200, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
PLAIN = settings(max_examples=2000, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))


class TestLimits:
    @pytest.mark.parametrize("limits", LIMITS)
    @pytest.mark.parametrize("run", STRATEGIES, ids=str)
    def test_no_draw_breaks_one(self, run: ExchangeStep | RouterStep, limits: str) -> None:
        """Whatever the layout; the rows of an exchange are their tokens' tags."""

        @settings(max_examples=25, suppress_health_check=list(HealthCheck))
        @given(data=st.data())
        def holds(data: st.DataObject) -> None:
            layout = data.draw(st.sampled_from(LAYOUTS))
            workload = data.draw(STRATEGIES[run]("default", layout, LIMITS[limits], "cpu"))
            assert broken(LIMITS[limits], workload, "cpu") is None
            for m, ranks in enumerate(workload.batches if run == ExchangeStep() else ()):
                for rank, batch in enumerate(ranks):
                    row = tags.decode(batch.x_TD)
                    assert ({m}, {rank}) == ({m, *row.microbatch_R.tolist()}, {rank, *row.rank_R.tolist()})

        holds()


class TestFeatures:
    @pytest.mark.filterwarnings("ignore:Generating overly large repr")
    @pytest.mark.parametrize(("layout", "limits"), [
        (Layout(2, ep=2), "none"), (Layout(2, ep=2), "multiples of 16"), (Layout(1), "even and not zero"),
    ])  # fmt: skip
    @pytest.mark.parametrize("run", STRATEGIES, ids=str)
    def test_what_is_required_can_be_drawn(self, run: ExchangeStep | RouterStep, layout: Layout, limits: str) -> None:
        """Else a run could never have the minimum that it must have."""
        workloads = STRATEGIES[run]("default", layout, LIMITS[limits], "cpu")
        for feature in required(run, Freedom.under(LIMITS[limits], layout, "cpu")):
            assert feature.has(find(workloads, feature.has, settings=PLAIN)), feature.name

    def test_what_is_required_depends_on_the_limits(self) -> None:
        """Each limit takes away what it forbids, and nothing more."""
        names = {
            limits: {
                feature.name for feature in required(ExchangeStep(), Freedom.under(LIMITS[limits], LAYOUTS[1], "cpu"))
            }
            for limits in LIMITS
        }
        assert {"uneven tokens", "idle rank"} == names["none"] - names["even"]
        assert {"uneven tokens", "idle rank", "all ranks idle"} == names["none"] - names["even and not zero"]
        assert {
            "dropped slot", "token without slots", "rank that sends nothing", "expert twice in a token"
        } == names["none"] - names["kept"]  # fmt: skip
        assert {"two in flight", "float32", "float64", "float16", "subnormal weight"} == (
            names["none"] - names["one at a time"]
        )

    def test_the_smallest_numbers_of_tokens_are_drawn_that_are_allowed(self) -> None:
        """Up to 6, or the next one; none up to 4096 is a mistake of who declared the limit."""
        expected = {"none": (0, 1, 2, 3, 4, 5, 6), "multiples of 4": (0, 4), "multiples of 16": (16,)}
        assert expected == {limits: Freedom.under(LIMITS[limits], LAYOUTS[0], "cpu").tokens for limits in expected}
        with pytest.raises(ValueError, match="allow no number of tokens from 1 to 4096"):
            Freedom.under([Limit("tokens", (0, 5000), "-")], LAYOUTS[0], "cpu")

    def test_gpus_may_flush_subnormals(self) -> None:
        """Their kernels commonly do, and no fault of routing is in it."""
        on = {
            device: {feature.name for feature in required(ExchangeStep(), Freedom.under((), LAYOUTS[1], device))}
            for device in ("cpu", "cuda")
        }
        assert {"subnormal weight"} == on["cpu"] - on["cuda"]

    def test_products_in_bfloat16_may_flush_subnormals(self) -> None:
        """On CPUs with instructions for them they do: no weight is subnormal, and none is required to be."""
        only = (Limit("dtype", (torch.bfloat16,), "-"),)
        assert "subnormal weight" not in {
            f.name for f in required(ExchangeStep(), Freedom.under(only, LAYOUTS[1], "cpu"))
        }
        (subnormal,) = (
            f for f in required(ExchangeStep(), Freedom.under((), LAYOUTS[1], "cpu")) if f.name[:3] == "sub"
        )
        with pytest.raises(NoSuchExample):
            find(STRATEGIES[ExchangeStep()]("default", LAYOUTS[1], only, "cpu"), subnormal.has, settings=FEW)
