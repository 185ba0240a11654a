"""Turning one knob at a time."""

from __future__ import annotations

from dataclasses import fields

import pytest

from moe_conformance.contract import Config
from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus.exchange.one_option import KNOBS, names, one_at_a_time, turned


class TestOneAtATime:
    def test_every_configuration_differs_in_one_field(self) -> None:
        """The base comes first, and each of the others differs from it in exactly one field."""
        base = Config(top_k=3, extra=(("other", 1),))
        (first, same), *others = one_at_a_time(base, {**KNOBS, "top_k": (3, 4)})
        assert ("base", base) == (first, same)
        for name, config in others:
            names_of_fields = [field.name for field in fields(Config)]
            changed = [each for each in names_of_fields if getattr(config, each) != getattr(base, each)]
            assert 1 == len(changed), name
        assert (("other", 1), ("moe_permute_fusion", True)) == dict(others)["moe_permute_fusion-True"].extra

    def test_an_unknown_knob_is_refused(self) -> None:
        """A name that is neither a field nor marked as one backend's own is told."""
        with pytest.raises(ValueError, match="'fused' is no field of Config"):
            list(one_at_a_time(Config(), {"fused": (True,)}))

    def test_every_name_is_drawn(self) -> None:
        """The workloads go under the names that waivers may use."""
        drawn = [workload.name for workload in turned("alltoall", Layout(2, ep=2), "quick")]
        assert names() == tuple(drawn)
