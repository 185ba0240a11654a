"""Native's updates of the balance bias against the goldens; see `test_native.py`."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from moe_conformance.backends.native.router.balancing import BalancingRouters
from moe_conformance.backends.native.router.routing import Router
from moe_conformance.contract import Config, Topology
from moe_conformance.goldens.chapters import balance_bias as chapter
from self_tests.goldens.golden_native import assert_near, case_of, of


class Alone(BalancingRouters):
    """Native's, whose loads are those of all ranks already."""

    def over_ranks(self, loads_LE: Tensor) -> Tensor:
        """Return them."""
        return loads_LE


def routers(bias_E: Tensor) -> Alone:
    """Return a model of one router with a bias of float64."""
    options = {"routing.balance_bias": True, "balance.rate": chapter._RATE}
    config = Config(experts=len(bias_E), dtype=torch.float64).changed(options)
    router = Router(config, torch.device("cpu"))
    assert router.balance_bias is not None
    router.balance_bias.copy_(bias_E)
    return Alone(config, cast(Topology, None), [router])


def bias_of(built: Alone) -> Tensor:
    """Return the bias of its one router."""
    return cast(Tensor, built.routers[0].balance_bias)


class TestBalanceBias:
    values: ClassVar[Any] = of("balance_bias")

    @pytest.mark.parametrize("case", chapter._LOADS)
    def test_updates(self, case: str) -> None:
        """Uneven loads, one at the mean, even ones, none, and loads that float64 does not tell apart."""
        own = case_of(self.values, case, "in")
        built = routers(own["bias_E"])
        built.count(0, own["loads_E"])
        built.update()
        assert_near(bias_of(built), case_of(self.values, case, "out")["bias_E"])

    def test_training(self) -> None:
        """Forwards of all kinds, with updates between them; the forced and the recomputed one never count here."""
        own = case_of(self.values, "training", "in")
        built = routers(own["bias_E"])
        for kind, load_E in zip(chapter._TRAINING, own["loads_NE"], strict=True):
            built.train(kind != "evaluation")
            with torch.set_grad_enabled(kind != "no_grad"):
                if kind is None:
                    built.update()
                elif built.counts() and kind not in ("forced", "recomputed"):
                    built.count(0, load_E)
        stored = case_of(self.values, "training", "out")
        assert_near(bias_of(built), stored["bias_E"])
        assert torch.equal(built.loads_LE[0], stored["counters_E"])
