"""Native against the goldens: each golden of a requirement that has a check judges an implementation.

The golden of experts judges every backend, in the workload `own-golden-even` of the quick profile, and that of training
in `train-golden` of the full one. The others judge native's functions here, in one process: what it computes from the
stored inputs is what was stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from moe_conformance.backends.native.groups import groups
from moe_conformance.backends.native.layer.experts import swiglu
from moe_conformance.backends.native.layer.shared_experts import Score
from moe_conformance.backends.native.router import capacity
from moe_conformance.backends.native.router.forcing import ForcedRouter
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Topology
from moe_conformance.goldens import stored_values
from moe_conformance.goldens.chapters import forcing as forcing_chapter
from moe_conformance.goldens.chapters import groups as groups_chapter
from moe_conformance.goldens.chapters import routing as routing_chapter
from moe_conformance.goldens.chapters.capacity import _CAPACITIES as CAPACITIES
from moe_conformance.spec.places import checked
from moe_conformance.workloads import golden
from self_tests.goldens.golden_native import AlmostAlone, assert_near, case_of, of

CPU = torch.device("cpu")
JUDGED = ("balance_bias", "capacity", "exchange", "fast_paths", "forcing", "groups", "losses", "overload", "permute",
          "routing", "scatter", "shared_experts", "thd", "token_padding")  # fmt: skip


class GivenLogits(Router):
    """A router whose tokens are logits."""

    def _logits(self, x_TD: Tensor) -> Tensor:
        return x_TD


def config_of(experts: int, top_k: int, **options: Any) -> Config:
    """Return a configuration in float64."""
    plain = Config(experts=experts, top_k=top_k, hidden=experts, dtype=torch.float64)
    return plain.changed({f"routing.{name}": value for name, value in options.items()})


class TestEveryGolden:
    def test_each_of_a_checked_requirement_judges_an_implementation(self) -> None:
        """Here, or every backend; chapters without a check wait for theirs."""
        entries = stored_values.read_manifest(stored_values.folder())
        of_checks = {chapter for chapter, entry in entries.items() if set(entry.requirements) & set(checked())}
        assert of_checks == {*JUDGED, golden.CHAPTER, "training"}


class TestRouting:
    values: ClassVar = of("routing")

    @pytest.mark.parametrize("case", [*routing_chapter._CASES, *routing_chapter._MORE])
    def test_choice_weights_and_gradients(self, case: str) -> None:
        """Of every score, normalisation, bias and group limit; where scores tie, the experts are free."""
        settings: Mapping[str, Any] = {**routing_chapter._CASES, **routing_chapter._MORE}[case]
        own, stored = case_of(self.values, case, "in"), case_of(self.values, case, "out")
        router = GivenLogits(config_of(12, 3, balance_bias="bias_E" in own, **settings), CPU)
        if router.balance_bias is not None:
            router.balance_bias.copy_(own["bias_E"])
        x = own["logits_TE"].clone().requires_grad_()
        routing = router(x).routing
        clear_T = stored["margins_T"] > 0
        assert bool(clear_T.any()) or not len(clear_T)
        assert torch.equal(routing.ids_TK[clear_T].sort(1).values, stored["ids_TK"][clear_T].sort(1).values)
        if case == "ties":  # two experts of equal scores may be either's slot
            return
        assert torch.equal(routing.ids_TK[clear_T], stored["ids_TK"][clear_T])
        assert_near(routing.weights_TK[clear_T], stored["weights_TK"][clear_T])
        (dlogits_TE,) = torch.autograd.grad(routing.weights_TK, x, own["upstream_TK"])
        assert_near(dlogits_TE[clear_T], stored["dlogits_TE"][clear_T])


class TestCapacity:
    values: ClassVar = of("capacity")

    @pytest.mark.parametrize("case", ["sizes", "rounded"])
    def test_capacities(self, case: str) -> None:
        """Of many sizes, the one that is legal, or within what rounding a product leaves open."""
        own, stored = case_of(self.values, case, "in"), case_of(self.values, case, "out")
        for n, (T, K, E) in enumerate(
            zip(own["tokens_N"].tolist(), own["top_k_N"].tolist(), own["experts_N"].tolist(), strict=True)
        ):
            least = int(own["minimum_N"][n]) if "minimum_N" in own else 0
            asked = Config(experts=E, top_k=K).changed({
                "capacity.factor": float(own["factor_N"][n]), "capacity.minimum": least
            })  # fmt: skip
            assert int(stored["least_N"][n]) <= capacity.of_rank(asked, T) <= int(stored["largest_N"][n])

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_what_is_kept(self, rank: int) -> None:
        """By weight and by position, with every capacity."""
        own, stored = case_of(self.values, f"rank-{rank}", "in"), case_of(self.values, f"rank-{rank}", "out")
        for n, room in enumerate(CAPACITIES):
            for policy, worth_TK in (("weight", own["weights_TK"]), ("position", None)):
                kept_TK = capacity.keep(own["ids_TK"], 5, room, worth_TK)
                assert torch.equal(kept_TK, stored[f"kept-by-{policy}_CTK"][n].bool())

    @pytest.mark.parametrize("case", ["as-they-are", "nothing-kept", "no-tokens"])
    def test_weights_of_the_kept(self, case: str) -> None:
        """They stay as they are, and the dropped get no gradient; dividing them anew is not what native does."""
        own, stored = case_of(self.values, case, "in"), case_of(self.values, case, "out")
        router = Router(Config(experts=5, top_k=3).changed({"capacity.factor": 0.0}), CPU)
        router._capacity = lambda tokens: 0 if case == "nothing-kept" else 2  # type: ignore[method-assign]
        weights_TK = own["weights_TK"].clone().requires_grad_()
        ids_TK, kept_TK = router._drop(own["ids_TK"], weights_TK)
        assert torch.equal(ids_TK, stored["ids_TK"])
        if case == "as-they-are":
            assert_near(kept_TK, stored["weights_TK"])
        (back_TK,) = torch.autograd.grad(kept_TK, weights_TK, own["upstream_TK"])
        if case == "as-they-are":
            assert_near(back_TK, stored["back_TK"])
        assert torch.equal(kept_TK != 0, stored["kept_TK"].bool())


class TestForcing:
    values: ClassVar = of("forcing")

    @pytest.mark.parametrize("case", forcing_chapter._SCORES)
    def test_weights_of_forced_experts(self, case: str) -> None:
        """By the router's own logits, masked ones at 0, with their gradient; where nothing decides them, finite."""
        own, stored = case_of(self.values, case, "in"), case_of(self.values, case, "out")
        asked = config_of(8, 3, forced=(("round_robin", None),), **forcing_chapter._SCORES[case])
        router = ForcedRouter(asked, CPU, cast("Topology", AlmostAlone()), 0)
        decided_T, x = ~stored["undecided_T"].bool(), own["logits_TE"].clone().requires_grad_()
        weights_TK = router._weights(router._scores(x), own["ids_TK"])
        assert bool(weights_TK.isfinite().all())
        assert_near(weights_TK[decided_T], stored["weights_TK"][decided_T])
        (dlogits_TE,) = torch.autograd.grad(weights_TK, x, own["upstream_TK"])
        assert_near(dlogits_TE[decided_T], stored["dlogits_TE"][decided_T])

    @pytest.mark.parametrize("case", forcing_chapter._SCORES)
    def test_forced_logits_are_straight_through(self, case: str) -> None:
        """Their values, and the gradient to the router's own."""
        own, stored = case_of(self.values, case, "in"), case_of(self.values, case, "out")
        router = ForcedRouter(config_of(8, 3, forced=(("random", None),)), CPU, cast("Topology", AlmostAlone()), 0)
        x = own["logits_TE"].clone().requires_grad_()
        z_TE = router._replace(x, own["forced_TE"])
        (dlogits_TE,) = torch.autograd.grad(z_TE, x, own["upstream_TE"])
        assert torch.equal(z_TE, stored["z_TE"])
        assert torch.equal(dlogits_TE, stored["dlogits-of-z_TE"])


class TestGroups:
    values: ClassVar = of("groups")

    @pytest.mark.parametrize("case", groups_chapter.LAYOUTS)
    def test_members(self, case: str) -> None:
        """Of every group of every name."""
        names = ("world", "tp", "cp", "pp", "ep", "etp")
        made = groups(dict(zip(names, groups_chapter.LAYOUTS[case], strict=True)))
        stored = case_of(self.values, case, "out")
        for n, name in enumerate(groups_chapter.NAMES):
            assert [rank for group in made[name] for rank in group] == stored["ranks_GW"][n].tolist()
            assert {int(stored["group-size_G"][n])} == {len(group) for group in made[name]}

    @pytest.mark.parametrize("case", ["sizes", "not-positive"])
    def test_sizes(self, case: str) -> None:
        """Which make a layout and which do not."""
        taken = []
        for world, *axes in case_of(self.values, case, "in")["sizes_N6"].tolist():
            try:
                groups({"world": world, **dict(zip(("tp", "cp", "pp", "ep", "etp"), axes, strict=True))})
                taken.append(1)
            except ValueError:
                taken.append(0)
        assert case_of(self.values, case, "out")["valid_N"].tolist() == taken


class TestSharedExperts:
    def test_parts_and_factors(self) -> None:
        """Of each, with its bias, and the gate."""
        values = of("shared_experts")
        stored, x_TD = case_of(values, "shared", "out"), case_of(values, "rank-0", "in")["x_TD"]
        gate = Score(Config(hidden=x_TD.shape[1], dtype=torch.float64), CPU)
        with torch.no_grad():
            gate.score_1D.copy_(case_of(values, "shared", "in")["gate_D"])
        total_TD = torch.zeros_like(x_TD)
        for n in range(3):
            own = case_of(values, f"shared-{n}", "in")
            h_TD = swiglu(x_TD, own["gate_FD"], own["up_FD"], own["down_DF"]) + own.get("bias_D", 0)
            assert_near(h_TD, stored[f"h_TD-{n}"])
            total_TD = total_TD + h_TD
        factors_T1 = gate(x_TD)
        assert_near(factors_T1[:, 0], stored["factors_T"])
        assert_near(factors_T1 * total_TD, stored["part_TD"])
        assert_near(total_TD, stored["part-without-gate_TD"])
