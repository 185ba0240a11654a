"""Turning one knob at a time."""

from __future__ import annotations

import pytest

from moe_conformance.chapters.exchange.workloads.one_option import KNOBS, names, one_at_a_time, turned
from moe_conformance.contract import Config
from moe_conformance.contract.topology import Layout


class TestOneAtATime:
    def test_every_configuration_differs_in_one_field(self) -> None:
        """The base comes first, and each of the others differs from it in exactly one option."""
        base = Config(top_k=3, extra=(("other", 1),))
        (first, same), *others = one_at_a_time(base, {**KNOBS, "top-k": ("top_k", (3, 4))})
        assert ("base", base) == (first, same)
        for name, config in others:
            changed = [option for option, value in config.options().items() if value != base.options()[option]]
            assert 1 == len(changed), name
        assert (("other", 1), ("moe_permute_fusion", True)) == dict(others)["moe-permute-fusion-True"].extra

    def test_an_unknown_knob_is_refused(self) -> None:
        """An option that is neither one of the configuration nor marked as one backend's own is told."""
        with pytest.raises(ValueError, match="Config has no option 'fused'"):
            list(one_at_a_time(Config(), {"fused": ("fused", (True,))}))

    def test_every_name_is_drawn(self) -> None:
        """The workloads go under the names that waivers may use."""
        drawn = [workload.name for workload in turned("alltoall", Layout(2, ep=2), "quick")]
        assert names() == tuple(drawn)
